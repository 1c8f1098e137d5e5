// Pagers that share a budget: who needs memory has more of it than an equal part, until who is entitled to it wants it.
// Method: two pagers in one process, with a share each, over memory that is counted.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/budget_ledger.h"
#include "support/counting_memory.h"
#include "support/pager_fixture.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kNodePages = 64;
constexpr std::size_t kEqualPages = kNodePages / 2;
constexpr std::size_t kGuaranteedPages = 8;

/// A pager and what it holds in its segments.
struct Rank {
    Rank(LedgerPage& page, CountingMemory& memory)
        : share(page, kGuaranteedPages * kPageBytes, std::chrono::seconds(10)), pager(options(memory)) {}

    PagerOptions options(CountingMemory& memory) {
        PagerOptions options = options_with(kEqualPages);
        options.share = &share;
        options.memory = &memory;
        options.longest_operator = std::chrono::seconds(30);
        return options;
    }
    void add(std::size_t segment_count, std::size_t pages, std::uint32_t first_seed) {
        for (std::size_t i = 0; i < segment_count; ++i) {
            segments.push_back(filled_segment(pager, pages, first_seed + static_cast<std::uint32_t>(i)));
        }
        this->first_seed = first_seed;
    }
    /// Looks at every byte.
    void expect_right() {
        for (std::size_t i = 0; i < segments.size(); ++i) {
            const PinGuard guard = pin(pager, segments[i], Access::read);
            EXPECT_TRUE(holds(*segments[i], first_seed + static_cast<std::uint32_t>(i)));
        }
    }
    std::size_t resident_bytes() const { return pager.statistics().memory.frame_bytes; }

    BudgetShare share;
    Pager pager;
    std::vector<std::shared_ptr<Segment>> segments;
    std::uint32_t first_seed = 0;
};

struct SharedBudgetTest : testing::Test {
    SharedBudgetTest() { page.lay_out(kNodePages * kPageBytes, 2); }
    ~SharedBudgetTest() override {
        EXPECT_LE(memory.peak_bytes(), kNodePages * kPageBytes);
        EXPECT_GT(memory.peak_bytes(), kEqualPages * kPageBytes);
    }

    LedgerPage page{};
    CountingMemory memory;
};

TEST_F(SharedBudgetTest, WhoIsBusyHasMoreThanItsPartAndTheOtherGetsItBack) {
    Rank busy(page, memory);
    Rank idle(page, memory);
    idle.add(4, 1, 100);
    busy.add(15, 3, 1);
    EXPECT_GE(busy.resident_bytes(), 44 * kPageBytes) << "45 pages, and a reserve";
    EXPECT_EQ(busy.pager.statistics().evictions, 0u);
    EXPECT_GT(busy.share.held_bytes(), busy.share.equal_bytes());
    const ShareStatistics before = busy.pager.statistics().share;
    EXPECT_EQ(before.guaranteed_bytes, kGuaranteedPages * kPageBytes);
    EXPECT_EQ(before.guaranteed_bytes + before.leased_bytes, busy.pager.statistics().memory.limit_bytes);

    idle.add(24, 1, 200);  // 28 pages: less than its part
    EXPECT_TRUE(comes_true([&] {
        idle.segments.erase(idle.segments.begin(), idle.segments.begin() + 4 * (idle.segments.size() > 24));
        idle.first_seed = 200;
        idle.expect_right();
        return idle.resident_bytes() == 24 * kPageBytes;
    }));
    EXPECT_LT(busy.resident_bytes(), 44 * kPageBytes);
    EXPECT_GE(busy.share.held_bytes(), busy.share.equal_bytes());
    EXPECT_GT(busy.pager.statistics().share.given_back_bytes, 0u);
    EXPECT_EQ(busy.pager.statistics().share.most_leased_bytes, before.leased_bytes);
    EXPECT_EQ(idle.pager.statistics().share.given_back_bytes, 0u);
    busy.expect_right();
    idle.expect_right();
}

// What only fits an equal part is waited for, not refused: an operator on pages that all have to be there at once. The
// other one would keep its pages: it requested them.
TEST_F(SharedBudgetTest, AnOperatorThatFitsTheEqualPartWaitsForIt) {
    Rank greedy(page, memory);
    Rank late(page, memory);
    greedy.add(18, 3, 1);
    for (const std::shared_ptr<Segment>& segment : greedy.segments) greedy.pager.prefetch(segment);
    ASSERT_LT(late.share.held_bytes() + kNodePages * kPageBytes - greedy.share.held_bytes(), 25 * kPageBytes);
    late.add(1, 28, 100);  // pinned as a whole
    late.expect_right();
    greedy.expect_right();
}

TEST_F(SharedBudgetTest, BeforeAllHaveComeAPartIsTheLimit) {
    Rank first(page, memory);
    first.add(15, 3, 1);
    EXPECT_EQ(first.pager.statistics().memory.limit_bytes, kEqualPages * kPageBytes);
    EXPECT_THROW(first.add(1, kEqualPages + 1, 100), OutOfTierMemory);
    Rank second(page, memory);
    EXPECT_NO_THROW(first.add(1, kEqualPages + 1, 100));
}

// At the end of a step who uses less than its part gives the rest to who is short.
TEST_F(SharedBudgetTest, WhatIsNotUsedIsGivenBackAtTheEndOfAStep) {
    Rank first(page, memory);
    Rank second(page, memory);
    first.pager.free_range(first.pager.allocate_range(24 * kPageBytes));
    first.add(2, 1, 1);
    EXPECT_GE(first.share.held_bytes(), 24 * kPageBytes);
    second.add(15, 3, 100);
    EXPECT_GT(second.share.wanted_bytes(), 0u);
    const std::size_t held_bytes = second.share.held_bytes();
    first.pager.end_step();
    EXPECT_TRUE(comes_true([&] { return first.share.held_bytes() < 12 * kPageBytes; }));
    EXPECT_TRUE(comes_true([&] { return second.share.held_bytes() > held_bytes; }));
    first.expect_right();
    second.expect_right();
}

TEST_F(SharedBudgetTest, ARankThatEndsLeavesItsMemoryToTheOther) {
    Rank first(page, memory);
    {
        Rank second(page, memory);
        second.add(10, 3, 100);
        EXPECT_GT(second.share.held_bytes(), 28 * kPageBytes);
    }
    const Rank third(page, memory);
    first.add(15, 3, 1);
    EXPECT_GT(first.share.held_bytes(), 44 * kPageBytes);
    first.expect_right();
}

// Both are short by turns and always, and steps end. Method: threads that read, write and allocate at random.
TEST_F(SharedBudgetTest, NothingIsLostWhileBothAreShort) {
    for (const std::uint64_t seed : seeds({.usual = 2, .full = 40})) {
        Rank ranks[2] = {{page, memory}, {page, memory}};
        for (Rank& rank : ranks) rank.add(30, 2, 1);
        const auto work = [&](Rank& rank, std::uint64_t of_rank) {
            std::mt19937_64 random(of_rank);
            for (int i = 0; i < 400; ++i) {
                const std::size_t chosen = random() % (random() % 64 < 32 ? rank.segments.size() : 4);
                const bool writes = random() % 4 == 0;
                const std::span<std::byte> range = rank.pager.allocate_range((1 + random() % 6) * kPageBytes);
                {
                    const PinGuard guard =
                        pin(rank.pager, rank.segments[chosen], writes ? Access::write : Access::read);
                    EXPECT_TRUE(holds(*rank.segments[chosen], 1 + static_cast<std::uint32_t>(chosen)));
                    if (writes) fill(*rank.segments[chosen], 1 + static_cast<std::uint32_t>(chosen));
                }
                rank.pager.free_range(range);
                if (i % 50 == 49) rank.pager.end_step();
            }
        };
        std::thread other([&] { work(ranks[1], 2 * seed + 1); });
        work(ranks[0], 2 * seed);
        other.join();
        for (Rank& rank : ranks) rank.expect_right();
        for (Rank& rank : ranks) EXPECT_GT(rank.pager.statistics().share.most_leased_bytes, 0u);
    }
}

}  // namespace
}  // namespace torch_offload::test
