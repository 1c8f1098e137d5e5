// Which pages should go: a pure function of candidates and predicted uses. Layer pager: includes base, trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pager/trace.h"

namespace torch_offload {

/// A page that could go now.
struct EvictionCandidate {
    std::shared_ptr<Segment> segment;
    Page* page = nullptr;
    std::size_t size_bytes = 0;
    Distance next_use = kNever;  // from the trace; equal for all without one
    std::uint64_t last_use = 0;  // a clock that grows; decides among equals, oldest first
    bool is_dirty = false;
};

/// Picks candidates with the furthest next use until they sum to `wanted_bytes` (or all of them), leaving those
/// used within `keep_within`. Among equals clean pages go before dirty ones, then the least recently used.
/// Source: furthest next use after Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966.
std::vector<EvictionCandidate> choose_victims(std::vector<EvictionCandidate> candidates, std::size_t wanted_bytes,
                                              Distance keep_within);

}  // namespace torch_offload
