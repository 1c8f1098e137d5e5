#include "pager/prefetch_queue.h"

#include <gtest/gtest.h>

#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

// Of several requests at one segment the last counts, where it stands and for its bytes once. Method: one segment
// hinted at ten times, around another.
TEST(PrefetchQueue, OfSeveralTheLastCounts) {
    Pager pager(options_with(8));
    const auto often = filled_segment(pager, 1, 1);
    const auto once = filled_segment(pager, 1, 2);
    PrefetchQueue prefetch_queue;
    PrefetchQueue::Owners changed;
    const auto request_at = [&](const std::shared_ptr<Segment>& segment, std::uint64_t now) {
        segment->last_use = now;
        prefetch_queue.add(segment, now, changed);
    };
    for (std::uint64_t now = 1; now <= 9; ++now) request_at(often, now);
    request_at(once, 10);
    request_at(often, 11);

    const PrefetchQueue::Next first = prefetch_queue.next(changed);
    EXPECT_EQ(first.segment, once);
    EXPECT_EQ(first.bytes_before, 0u);
    prefetch_queue.read(once);
    const PrefetchQueue::Next second = prefetch_queue.next(changed);
    EXPECT_EQ(second.segment, often);
    EXPECT_EQ(second.bytes_before, kPageBytes);
    EXPECT_TRUE(changed.empty()) << "nothing was passed over or ended";
    prefetch_queue.end(11, changed);
    EXPECT_EQ(changed.size(), 2u);
    EXPECT_EQ(often->outstanding_since, 0u);
}

}  // namespace
}  // namespace torch_offload::test
