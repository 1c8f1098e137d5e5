#include "pager/eviction.h"

#include <gtest/gtest.h>

#include <array>

namespace torch_offload::test {
namespace {

struct Pages {
    std::array<Page, 4> pages;

    EvictionCandidate candidate(std::size_t i, Distance next_use, std::uint64_t last_use, bool is_dirty) {
        return {nullptr, &pages[i], 10, next_use, last_use, is_dirty};
    }
};

// The page used last in the future goes first, and no more go than are needed. Method: three distances, one wanted.
TEST(Eviction, FurthestNextUseGoesFirst) {
    Pages p;
    const auto victims =
        choose_victims({p.candidate(0, 5, 0, false), p.candidate(1, 50, 9, true), p.candidate(2, 20, 0, false)}, 10, 0);
    ASSERT_EQ(victims.size(), 1u);
    EXPECT_EQ(victims[0].page, &p.pages[1]);
}

// Pages needed soon stay even when memory is wanted. Method: a horizon above one of the distances.
TEST(Eviction, PagesWithinTheHorizonStay) {
    Pages p;
    const auto victims = choose_victims({p.candidate(0, 5, 0, false), p.candidate(1, 50, 0, false)}, 100, 6);
    ASSERT_EQ(victims.size(), 1u);
    EXPECT_EQ(victims[0].page, &p.pages[1]);
}

// Without a prediction clean pages go before dirty ones, and the least recently used first. Method: equal distances.
TEST(Eviction, CleanThenOldestAmongEquals) {
    Pages p;
    const auto victims = choose_victims(
        {p.candidate(0, kNever, 1, true), p.candidate(1, kNever, 3, false), p.candidate(2, kNever, 2, false)}, 30, 0);
    ASSERT_EQ(victims.size(), 3u);
    EXPECT_EQ(victims[0].page, &p.pages[2]);
    EXPECT_EQ(victims[1].page, &p.pages[1]);
    EXPECT_EQ(victims[2].page, &p.pages[0]);
}

}  // namespace
}  // namespace torch_offload::test
