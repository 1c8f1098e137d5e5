// The pages that accesses behind the dispatcher reached last. Layer pager.
#pragma once

#include <cstddef>
#include <deque>

#include "pager/page_table.h"

namespace torch_offload {

/// Pages that are kept in memory for a while after a fault brought them: a kernel that reaches several tensors by
/// faults makes progress, where each page that comes would otherwise send away one that it still needs. Each has a pin
/// for it. Threads: none; the owner locks.
class FaultHolds {
public:
    explicit FaultHolds(std::size_t most_bytes) : most_bytes_(most_bytes) {}

    /// Pins the page, and gives up what has to make room for it. Without memory to remember it, the page is not held.
    void add(Page& page) noexcept;
    /// Gives up the older half, at least one page. False if there was none.
    bool drop_older_half() noexcept;
    /// Gives up the pages of a segment. False if there was none.
    bool drop(const Segment& segment) noexcept;
    bool empty() const noexcept { return pages_.empty(); }

private:
    void drop_oldest() noexcept;

    std::size_t most_bytes_;
    std::size_t held_bytes_ = 0;
    std::deque<Page*> pages_;  // the oldest first
};

}  // namespace torch_offload
