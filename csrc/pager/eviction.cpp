#include "pager/eviction.h"

#include <algorithm>
#include <tuple>

namespace torch_offload {

std::vector<EvictionCandidate> choose_victims(std::vector<EvictionCandidate> candidates, std::size_t wanted_bytes,
                                              Distance keep_within) {
    std::erase_if(candidates, [&](const EvictionCandidate& c) { return c.next_use < keep_within; });
    const auto goes_before = [](const EvictionCandidate& a, const EvictionCandidate& b) {
        return std::tie(b.next_use, a.is_dirty, a.last_use) < std::tie(a.next_use, b.is_dirty, b.last_use);
    };
    std::sort(candidates.begin(), candidates.end(), goes_before);
    std::size_t chosen_bytes = 0;
    std::size_t count = 0;
    while (count < candidates.size() && chosen_bytes < wanted_bytes) chosen_bytes += candidates[count++].size_bytes;
    candidates.resize(count);
    return candidates;
}

}  // namespace torch_offload
