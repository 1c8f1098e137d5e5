#include "pager/deadlines.h"

#include <gtest/gtest.h>

#include <array>

namespace torch_offload::test {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr double kRate = 100;  // bytes per second

// What is due late and small can wait, what is due at once cannot. Method: three reads far apart.
TEST(Deadlines, SlackIsTimeLessReading) {
    const std::array reads{DueReads{0, 100}, DueReads{5 * kSecondNs, 100}, DueReads{20 * kSecondNs, 100}};
    const std::vector<std::int64_t> expected{-1 * kSecondNs, 3 * kSecondNs, 17 * kSecondNs};
    EXPECT_EQ(slack_of(reads, kRate), expected);
}

// A burst makes what is due before it start earlier. Method: a read with time to spare before one that takes longer
// than is left.
TEST(Deadlines, BurstCastsItsShadow) {
    const std::array reads{DueReads{5 * kSecondNs, 100}, DueReads{6 * kSecondNs, 800}, DueReads{60 * kSecondNs, 100}};
    const std::vector<std::int64_t> expected{-3 * kSecondNs, -3 * kSecondNs, 50 * kSecondNs};
    EXPECT_EQ(slack_of(reads, kRate), expected);
}

// What is in memory already takes no time. Method: nothing missing.
TEST(Deadlines, NothingMissingIsNoWork) {
    const std::array reads{DueReads{kSecondNs, 0}, DueReads{2 * kSecondNs, 0}};
    EXPECT_EQ(slack_of(reads, kRate), (std::vector<std::int64_t>{kSecondNs, 2 * kSecondNs}));
    EXPECT_TRUE(slack_of({}, kRate).empty());
}

}  // namespace
}  // namespace torch_offload::test
