// Which parts of larger blocks of memory temporaries have. Bookkeeping only: no system call.
// Layer pager: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

namespace torch_offload {

/// A heap with the smallest part that fits (best fit) and parts that join their free neighbors (Knuth, The Art of
/// Computer Programming, volume 1, 2.5). A part may lose its memory, which is moved elsewhere: its addresses stay the
/// block's. Blocks that are not divided are taken as a whole, by exact size.
/// Threads: none of its own; the owner holds a lock.
class RangeHeap {
public:
    enum class Division : std::uint8_t { whole, parts };

    /// Adds a block, whose first `taken_bytes` are in use and whose rest, if it is divided, is idle.
    /// Throws: std::bad_alloc, with nothing changed; so do all that throw.
    void add(std::span<std::byte> block, std::size_t taken_bytes, Division division);

    /// An idle part of that size of a block of that kind, in use from now on.
    std::optional<std::span<std::byte>> take(std::size_t size_bytes, Division division);
    /// This one. Pre: it is an idle part, or within one.
    void take_within(std::span<std::byte> part);

    /// A part in use is idle again.
    void give(std::span<std::byte> part) noexcept;

    /// A part in use has no memory any more, and nobody uses its addresses. Returns its block, which is forgotten, if
    /// that was all of it.
    std::optional<std::span<std::byte>> lose(std::span<std::byte> part) noexcept;

    /// The part of at least that size that has been idle for longest, or nothing.
    std::optional<std::span<std::byte>> longest_idle(std::size_t at_least_bytes) const noexcept;
    std::optional<std::span<std::byte>> longest_idle(std::size_t at_least_bytes, Division division) const noexcept;

    bool is_divided(std::span<std::byte> part) const noexcept;

    /// Whether exactly that is a part in use.
    bool is_taken(std::span<std::byte> part) const noexcept;

    /// Whether that is a whole block.
    bool is_block(std::span<std::byte> part) const noexcept;

    /// Blocks of which nothing is in use.
    template <typename Visit>
    void for_each_unused(Visit visit) const {
        for (const auto& [begin, size_bytes] : blocks_) {
            if (!is_used(begin)) visit(std::span(begin, size_bytes));
        }
    }

private:
    enum class Use : std::uint8_t { idle, taken, without_memory };
    using Idle = std::set<std::pair<std::size_t, std::byte*>>;  // size, where
    struct Part {
        std::size_t size_bytes;
        std::byte* block;
        Use use;
        Division division;
        std::uint64_t given = 0;  // the later one is the larger
        Idle::node_type node{};   // while it is not idle, so that giving allocates nothing
    };
    using Parts = std::map<std::byte*, Part>;

    Idle& idle_of(const Part& part) noexcept { return idle_[static_cast<std::size_t>(part.division)]; }
    std::uint64_t given(std::span<std::byte> part) const noexcept;
    bool is_used(std::byte* block) const noexcept;
    static Idle::node_type make_node();
    void enter_idle(Parts::iterator part) noexcept;
    void leave_idle(Parts::iterator part) noexcept;
    Parts::iterator split(Parts::iterator part, std::size_t first_bytes);
    Parts::iterator join(Parts::iterator part) noexcept;

    Parts parts_;
    std::map<std::byte*, std::size_t> blocks_;  // bytes of each
    Idle idle_[2];                              // by Division
    std::uint64_t given_count_ = 0;
};

}  // namespace torch_offload
