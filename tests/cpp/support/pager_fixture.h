// Pagers with tiny pages and segments whose bytes say which they are.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "base/check.h"
#include "pager/pager.h"

namespace torch_offload::test {

inline constexpr std::size_t kPageElements = 4096;
inline constexpr std::size_t kPageBytes = kPageElements * 4;

inline PagerOptions options_with(std::size_t budget_pages, IoEngineKind engine = IoEngineKind::automatic) {
    PagerOptions options;
    options.budget_bytes = budget_pages * kPageBytes;
    options.directories = {OFFLOAD_TEST_DIRECTORY};
    options.engine = engine;
    options.page_elements = kPageElements;
    options.transfer_limits.retry_delays = {std::chrono::milliseconds(1)};
    return options;
}

/// The value of word `i` of a segment filled with `seed`.
inline std::uint32_t word_of(std::uint32_t seed, std::size_t i) {
    return seed * 2654435761u + static_cast<std::uint32_t>(i);
}

inline void fill(const Segment& segment, std::uint32_t seed) {
    auto* words = reinterpret_cast<std::uint32_t*>(segment.range().data());
    for (std::size_t i = 0; i < segment.size_bytes() / 4; ++i) words[i] = word_of(seed, i);
}

inline bool holds(const Segment& segment, std::uint32_t seed) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(segment.range().data());
    for (std::size_t i = 0; i < segment.size_bytes() / 4; ++i) {
        if (words[i] != word_of(seed, i)) return false;
    }
    return true;
}

inline PinGuard pin(Pager& pager, const std::shared_ptr<Segment>& segment, Access access) {
    const PinRequest request{segment, access};
    return pager.pin({&request, 1});
}

inline std::shared_ptr<Segment> filled_segment(Pager& pager, std::size_t pages, std::uint32_t seed,
                                               TraceId role = kNoTrace) {
    auto segment = pager.create_segment(pages * kPageBytes, 4, SegmentKind::parameter);
    segment->label = concat("segment ", seed);
    segment->trace_id = role;
    const PinGuard guard = pin(pager, segment, Access::overwrite);
    fill(*segment, seed);
    return segment;
}

/// The same with a role of its own in the trace.
inline std::shared_ptr<Segment> segment_with_role(Pager& pager, std::size_t pages, std::uint32_t seed) {
    return filled_segment(pager, pages, seed, pager.new_trace_id());
}

/// Waits for `condition`; false after ten seconds.
inline bool comes_true(const std::function<bool()>& condition) {
    for (int i = 0; i < 10'000; ++i) {
        if (condition()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
}

inline std::uint64_t total(const std::uint64_t (&by_kind)[kSegmentKindCount]) {
    return std::accumulate(std::begin(by_kind), std::end(by_kind), std::uint64_t{0});
}

}  // namespace torch_offload::test
