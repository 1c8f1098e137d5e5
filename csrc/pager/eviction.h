// Which segment's pages should go: all that have any in memory, ordered by their next use. Layer pager: includes base,
// trace.
#pragma once

#include <cstdint>
#include <set>

#include "pager/trace.h"

namespace torch_offload {

/// Segments, the one with the furthest next use first. Each change costs the logarithm of their number.
/// Source: furthest next use after Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966.
/// Threads: none; the pager's lock covers it.
class EvictionQueue {
public:
    struct Entry {
        EvictionRank rank;
        Segment* segment = nullptr;

        /// True for what should go first; the address only tells equals apart.
        bool operator<(const Entry& other) const noexcept;
    };
    using Iterator = std::set<Entry>::const_iterator;

    /// Adds the segment, or moves it to where its new rank belongs, which allocates nothing.
    void put(Segment& segment, const EvictionRank& rank);
    void remove(Segment& segment) noexcept;
    void clear() noexcept;

    Iterator begin() const noexcept { return entries_.begin(); }
    Iterator end() const noexcept { return entries_.end(); }
    std::size_t size() const noexcept { return entries_.size(); }

private:
    std::set<Entry> entries_;
};

}  // namespace torch_offload
