// The pages that accesses behind the dispatcher reached last. Layer pager.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "pager/page_table.h"

namespace torch_offload {

/// Pages that are kept in memory for a while after a fault brought them: a kernel that reaches several tensors by
/// faults makes progress, where each page that comes would otherwise send away one that it still needs. Each carries a
/// pin. Threads: none; the owner locks.
class FaultHolds {
public:
    explicit FaultHolds(std::size_t most_bytes) : most_bytes_(most_bytes) {}

    /// Takes over a pin of the page. Gives back pages that have to make room, whose pins are the caller's now.
    [[nodiscard]] std::vector<Page*> add(Page& page);
    /// Gives back the older half, at least one if there is any.
    [[nodiscard]] std::vector<Page*> take_older_half();
    /// Gives back those of a segment.
    [[nodiscard]] std::vector<Page*> take(const Segment& segment);
    bool empty() const noexcept { return pages_.empty(); }

private:
    std::size_t most_bytes_;
    std::size_t held_bytes_ = 0;
    std::deque<Page*> pages_;  // the oldest first
};

}  // namespace torch_offload
