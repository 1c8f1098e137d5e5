// Memory for direct I/O in tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "base/units.h"

namespace torch_offload::test {

/// Owns `size_bytes` aligned to kSectorBytes, zeroed.
class AlignedBuffer {
public:
    explicit AlignedBuffer(std::size_t size_bytes)
        : memory_(static_cast<std::byte*>(std::aligned_alloc(kSectorBytes, round_up(size_bytes, kSectorBytes)))),
          size_bytes_(size_bytes) {
        std::memset(memory_.get(), 0, size_bytes);
    }

    std::span<std::byte> bytes() const noexcept { return {memory_.get(), size_bytes_}; }

    /// Fills with bytes that depend on `seed` and on the position, in whole words: the memory is whole sectors.
    void fill(std::uint64_t seed) noexcept {
        auto* const words = reinterpret_cast<std::uint64_t*>(memory_.get());
        std::uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
        for (std::size_t i = 0; i < divide_up(size_bytes_, sizeof state); ++i) {
            state = state * 6364136223846793005 + 1442695040888963407;
            words[i] = state;
        }
    }

    bool operator==(const AlignedBuffer& other) const noexcept {
        return size_bytes_ == other.size_bytes_ && std::memcmp(memory_.get(), other.memory_.get(), size_bytes_) == 0;
    }

private:
    struct Free {
        void operator()(std::byte* memory) const noexcept { std::free(memory); }
    };

    std::unique_ptr<std::byte, Free> memory_;
    std::size_t size_bytes_;
};

}  // namespace torch_offload::test
