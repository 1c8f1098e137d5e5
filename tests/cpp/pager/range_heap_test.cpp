#include "pager/range_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "support/seeds.h"

namespace torch_offload::test {
namespace {

using Division = RangeHeap::Division;
using Range = std::span<std::byte>;

class Heap : public ::testing::Test {
protected:
    Range bytes(std::size_t begin, std::size_t size) { return std::span(memory_).subspan(begin, size); }
    std::size_t offset_of(Range range) const { return static_cast<std::size_t>(range.data() - memory_.data()); }

    RangeHeap heap_;

private:
    std::array<std::byte, 256> memory_{};
};

// The smallest part that fits is taken, and what it leaves is found again. Method: parts of 8 and 20 bytes; 6, 6, 14.
TEST_F(Heap, TakesTheSmallestThatFits) {
    heap_.add(bytes(0, 20), 0, Division::parts);
    heap_.add(bytes(32, 8), 0, Division::parts);
    EXPECT_EQ(offset_of(*heap_.take(6, Division::parts)), 32u);
    EXPECT_EQ(offset_of(*heap_.take(6, Division::parts)), 0u);
    EXPECT_EQ(offset_of(*heap_.take(14, Division::parts)), 6u);
    EXPECT_FALSE(heap_.take(3, Division::parts));
    EXPECT_EQ(offset_of(*heap_.take(2, Division::parts)), 38u);
}

// Parts that are given join their neighbors, never across blocks. Method: three parts of one block, given in an order
// in which the last joins both; a neighbor that is another block.
TEST_F(Heap, PartsJoinWithinTheirBlock) {
    heap_.add(bytes(0, 24), 8, Division::parts);
    heap_.add(bytes(24, 8), 0, Division::parts);
    const Range first = bytes(0, 8);
    const Range second = *heap_.take(6, Division::parts);
    EXPECT_EQ(offset_of(second), 24u);
    const Range third = *heap_.take(10, Division::parts);
    EXPECT_EQ(offset_of(third), 8u);
    heap_.give(first);
    heap_.give(second);
    EXPECT_FALSE(heap_.take(24, Division::parts));
    heap_.give(third);
    EXPECT_EQ(offset_of(*heap_.take(24, Division::parts)), 0u);
    EXPECT_EQ(offset_of(*heap_.take(8, Division::parts)), 24u);
}

// A block that is not divided is found by its exact size only. Method: one of 16 bytes; 8, 16.
TEST_F(Heap, WholeBlocksAreTakenByExactSize) {
    heap_.add(bytes(0, 16), 0, Division::whole);
    EXPECT_FALSE(heap_.take(8, Division::whole));
    EXPECT_FALSE(heap_.take(8, Division::parts));
    const std::optional<Range> taken = heap_.take(16, Division::whole);
    ASSERT_TRUE(taken);
    EXPECT_FALSE(heap_.is_divided(*taken));
    EXPECT_FALSE(heap_.take(16, Division::whole));
}

// A block ends with the last part that loses its memory. Method: two parts lose it, one of them after it was idle.
TEST_F(Heap, BlockEndsWithItsMemory) {
    heap_.add(bytes(0, 16), 6, Division::parts);
    EXPECT_TRUE(heap_.is_taken(bytes(0, 6)));
    EXPECT_FALSE(heap_.is_block(bytes(0, 6)));
    EXPECT_FALSE(heap_.lose(bytes(0, 6)));
    EXPECT_FALSE(heap_.is_taken(bytes(0, 6)));
    EXPECT_FALSE(heap_.take(11, Division::parts));
    heap_.take_within(bytes(8, 4));
    EXPECT_FALSE(heap_.lose(bytes(8, 4)));
    heap_.take_within(bytes(6, 2));
    EXPECT_FALSE(heap_.lose(bytes(6, 2)));
    heap_.take_within(bytes(12, 4));
    const std::optional<Range> block = heap_.lose(bytes(12, 4));
    ASSERT_TRUE(block);
    EXPECT_EQ(block->data(), bytes(0, 16).data());
    EXPECT_EQ(block->size(), 16u);
    EXPECT_FALSE(heap_.longest_idle(0));
}

// What has been idle for longest is told, of those that are large enough. Method: parts given one after another.
TEST_F(Heap, TellsWhatHasBeenIdleForLongest) {
    heap_.add(bytes(0, 4), 4, Division::parts);
    heap_.add(bytes(16, 8), 8, Division::whole);
    heap_.add(bytes(32, 12), 12, Division::parts);
    heap_.give(bytes(0, 4));
    heap_.give(bytes(16, 8));
    heap_.give(bytes(32, 12));
    EXPECT_EQ(offset_of(*heap_.longest_idle(0)), 0u);
    EXPECT_EQ(offset_of(*heap_.longest_idle(5)), 16u);
    EXPECT_EQ(offset_of(*heap_.longest_idle(5, Division::parts)), 32u);
    EXPECT_FALSE(heap_.longest_idle(13));
}

// Only blocks of which nothing is in use are visited. Method: one in use in part, one idle, one without memory in part.
TEST_F(Heap, VisitsUnusedBlocks) {
    heap_.add(bytes(0, 8), 4, Division::parts);
    heap_.add(bytes(16, 8), 0, Division::parts);
    heap_.add(bytes(32, 8), 4, Division::parts);
    heap_.lose(bytes(32, 4));
    std::vector<std::size_t> visited;
    heap_.for_each_unused([&](Range block) { visited.push_back(offset_of(block)); });
    EXPECT_EQ(visited, std::vector<std::size_t>({16, 32}));
}

// Parts in use never overlap, whatever is taken, given and lost, and all comes back. Method: random steps over blocks
// with an owner a byte.
TEST_F(Heap, PartsInUseAreDisjoint) {
    for (const std::uint64_t seed : seeds({.usual = 20, .full = 500})) {
        RangeHeap heap;
        std::vector<int> owner(256, -1);  // -1: no memory, 0: idle, else a range
        std::mt19937_64 random(seed);
        std::vector<Range> taken;
        int next = 1;
        const auto own = [&](Range range, int from, int to) {
            for (std::size_t i = offset_of(range); i < offset_of(range) + range.size(); ++i) {
                ASSERT_EQ(owner[i], from) << "seed " << seed << ", byte " << i;
                owner[i] = to;
            }
        };
        for (std::size_t begin = 0; begin < 256; begin += 64) {
            heap.add(bytes(begin, 64), 0, Division::parts);
            own(bytes(begin, 64), -1, 0);
        }
        for (int step = 0; step < 300; ++step) {
            if (random() % 2 == 0) {
                const auto range = heap.take(1 + random() % 40, Division::parts);
                if (!range) continue;
                own(*range, 0, next);
                ++next;
                taken.push_back(*range);
            } else if (!taken.empty()) {
                std::swap(taken[random() % taken.size()], taken.back());
                const Range range = taken.back();
                taken.pop_back();
                const bool is_lost = random() % 16 == 0;
                own(range, owner[offset_of(range)], is_lost ? -1 : 0);
                if (is_lost) {
                    heap.lose(range);
                } else {
                    heap.give(range);
                }
            }
        }
        for (const Range range : taken) {
            own(range, owner[offset_of(range)], 0);
            heap.give(range);
        }
        std::size_t idle_bytes = 0;
        while (const auto part = heap.longest_idle(1)) {
            own(*part, 0, -1);
            heap.take_within(*part);
            heap.lose(*part);
            idle_bytes += part->size();
        }
        EXPECT_GT(idle_bytes, 0u);
        EXPECT_EQ(std::count(owner.begin(), owner.end(), 0), 0) << "seed " << seed;
    }
}

}  // namespace
}  // namespace torch_offload::test
