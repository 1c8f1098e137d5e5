#include "pager/eviction.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

std::vector<Segment*> order_of(const EvictionQueue& queue) {
    std::vector<Segment*> order;
    for (const EvictionQueue::Entry& entry : queue) order.push_back(entry.segment);
    return order;
}

struct Segments {
    Pager pager{options_with(8)};
    std::vector<std::shared_ptr<Segment>> all;

    explicit Segments(std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            all.push_back(pager.create_segment(kPageBytes, 4, SegmentKind::parameter));
        }
    }
    Segment& operator[](std::size_t i) { return *all[i]; }
};

// The segment used last in the future comes first; among equals the least recently used. Method: four ranks.
TEST(EvictionQueue, FurthestNextUseThenOldest) {
    Segments s(4);
    EvictionQueue queue;
    queue.put(s[0], {5, 0});
    queue.put(s[1], {50, 9});
    queue.put(s[2], {20, 4});
    queue.put(s[3], {20, 3});
    EXPECT_EQ(order_of(queue), (std::vector<Segment*>{&s[1], &s[3], &s[2], &s[0]}));
    queue.clear();
    EXPECT_FALSE(s[0].eviction_rank.has_value());
}

// A segment stands in the queue once, at its latest rank. Method: a thousand random puts and removals against a list
// that is sorted anew each time.
TEST(EvictionQueue, KeepsTheLatestRankOfEach) {
    constexpr std::size_t kSegments = 7;
    Segments s(kSegments);
    EvictionQueue queue;
    std::vector<EvictionQueue::Entry> expected;
    std::mt19937 random(1);
    for (int turn = 0; turn < 1000; ++turn) {
        Segment& segment = s[random() % kSegments];
        std::erase_if(expected, [&](const EvictionQueue::Entry& entry) { return entry.segment == &segment; });
        if (random() % 4 == 0) {
            queue.remove(segment);
        } else {
            const EvictionRank rank{random() % 5, random() % 5};
            queue.put(segment, rank);
            expected.push_back({rank, &segment});
        }
        std::sort(expected.begin(), expected.end());
        std::vector<Segment*> order;
        for (const EvictionQueue::Entry& entry : expected) order.push_back(entry.segment);
        ASSERT_EQ(order_of(queue), order);
    }
    queue.clear();
}

}  // namespace
}  // namespace torch_offload::test
