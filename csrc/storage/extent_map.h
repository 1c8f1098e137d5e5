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
    /// Adds [offset, offset + size), which nobody had, as free space, joined with its neighbours.
    /// Throws: LogicError if it overlaps a hole; std::bad_alloc. Nothing has changed then.
    void add(std::uint64_t offset_bytes, std::size_t size_bytes);

    /// Takes `size_bytes` from the smallest hole that fits (of equals, the one at the lowest offset), or nothing.
    /// Throws: std::bad_alloc. Nothing has changed then.
    std::optional<std::uint64_t> take(std::size_t size_bytes);

    /// Gives back what was taken, whole. Allocates nothing: a full memory loses no piece of the file.
    /// Throws: LogicError if it overlaps a hole (a double free), or if nothing is taken. Nothing has changed then.
    void release(std::uint64_t offset_bytes, std::size_t size_bytes);

    std::uint64_t free_bytes() const noexcept { return free_bytes_; }
    std::size_t hole_count() const noexcept { return holes_.size(); }

private:
    using Holes = std::map<std::uint64_t, std::size_t>;                   // offset -> size
    using HolesBySize = std::set<std::pair<std::size_t, std::uint64_t>>;  // (size, offset)

    /// The memory of a hole.
    struct Node {
        Holes::node_type hole;
        HolesBySize::node_type by_size;
    };

    void make_spare();
    void keep_spare(Node node) noexcept;
    Node take_spare() noexcept;
    Node take_out(Holes::iterator hole) noexcept;
    void put_in(Node node, std::uint64_t offset_bytes, std::size_t size_bytes) noexcept;

    Holes holes_;
    HolesBySize by_size_;
    // As many nodes as extents are taken: the most holes that giving these back can make.
    std::multimap<std::uint64_t, std::size_t> spare_holes_;
    std::multiset<std::pair<std::size_t, std::uint64_t>> spare_by_size_;
    std::uint64_t free_bytes_ = 0;
};

}  // namespace torch_offload
