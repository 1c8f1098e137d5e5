// Where one mapping may end and another begin. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <vector>

namespace torch_offload {

/// The system moves one mapping a call, and makes one mapping of neighbors only where they came to be as one. So what
/// arrived in pieces leaves in pieces, cut at the seams between them. There may be seams where there is one mapping.
/// Threads: none of its own; the owner holds a lock.
class MappingSeams {
public:
    /// Memory comes to lie under `range`, in mappings of its own. Throws: std::bad_alloc; there may be seams too many.
    void add(std::span<const std::byte> range);

    /// Only the memory at the ends of `range` may be of two mappings. Throws: std::bad_alloc.
    void add_ends(std::span<const std::byte> range);

    /// Memory moves from `from` to `to`: its seams go along. Call before; forget(from) follows if it did.
    /// Throws: std::bad_alloc; there may be seams too many.
    void add_moved(std::span<const std::byte> from, const std::byte* to);

    /// There is no memory under `range` any more.
    void forget(std::span<const std::byte> range) noexcept;

    /// `range` cut at its seams, in order.
    std::vector<std::span<std::byte>> pieces_of(std::span<std::byte> range) const;

private:
    std::set<const std::byte*> seams_;
};

}  // namespace torch_offload
