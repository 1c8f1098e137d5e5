#include "pager/eviction.h"

#include <tuple>
#include <utility>

namespace torch_offload {

bool EvictionQueue::Entry::operator<(const Entry& other) const noexcept {
    return std::tie(other.rank.next_use, rank.last_use, segment) <
           std::tie(rank.next_use, other.rank.last_use, other.segment);
}

void EvictionQueue::put(Segment& segment, const EvictionRank& rank) {
    if (segment.eviction_rank) {
        auto entry = entries_.extract({*segment.eviction_rank, &segment});
        entry.value().rank = rank;
        entries_.insert(std::move(entry));
    } else {
        entries_.insert({rank, &segment});
    }
    segment.eviction_rank = rank;
}

void EvictionQueue::remove(Segment& segment) noexcept {
    if (!segment.eviction_rank) return;
    entries_.erase({*segment.eviction_rank, &segment});
    segment.eviction_rank.reset();
}

void EvictionQueue::clear() noexcept {
    for (const Entry& entry : entries_) entry.segment->eviction_rank.reset();
    entries_.clear();
}

}  // namespace torch_offload
