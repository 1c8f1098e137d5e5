// The checksum of a page, bound to which page it is. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_offload {

/// Which page the bytes are: a right page at the wrong place, or of an older version, is a mismatch.
struct PageIdentity {
    std::uint64_t store_id = 0;
    std::uint64_t page_id = 0;
    std::uint64_t version = 0;

    bool operator==(const PageIdentity&) const = default;
};

/// XXH3-64 of `bytes`, seeded with the identity (FORMAT.md). With AVX2 or AVX-512 where the machine has it.
/// Threads: any.
std::uint64_t page_checksum(std::span<const std::byte> bytes, const PageIdentity& identity) noexcept;

}  // namespace torch_offload
