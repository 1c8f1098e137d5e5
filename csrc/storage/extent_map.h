// Which bytes of a file are free. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace torch_offload {

/// A piece of a file: (file, offset, size). `file` numbers the scratch file, so that several directories may stripe.
struct Extent {
    std::uint32_t file = 0;
    std::uint64_t offset_bytes = 0;
    std::size_t size_bytes = 0;

    bool operator==(const Extent&) const = default;
};

/// Free space of one file as disjoint, coalesced holes.
/// Threads: none; the owner locks.
class ExtentMap {
public:
    /// Adds [offset, offset + size) as free space, joined with its neighbours.
    /// Throws: LogicError if it overlaps a hole (a double free); std::bad_alloc, where it has no neighbour. Nothing has
    /// changed then.
    void release(std::uint64_t offset_bytes, std::size_t size_bytes);

    /// Takes `size_bytes` from the smallest hole that fits (of equals, the one at the lowest offset), or nothing.
    /// Allocates nothing.
    std::optional<std::uint64_t> take(std::size_t size_bytes);

    std::uint64_t free_bytes() const noexcept { return free_bytes_; }
    std::size_t hole_count() const noexcept { return holes_.size(); }

private:
    using Hole = std::map<std::uint64_t, std::size_t>::iterator;

    void change(Hole hole, std::uint64_t offset_bytes, std::size_t size_bytes) noexcept;
    void drop(Hole hole) noexcept;

    std::map<std::uint64_t, std::size_t> holes_;               // offset -> size
    std::set<std::pair<std::size_t, std::uint64_t>> by_size_;  // (size, offset) of the same holes
    std::uint64_t free_bytes_ = 0;
};

}  // namespace torch_offload
