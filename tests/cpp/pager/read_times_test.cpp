#include "pager/read_times.h"

#include <gtest/gtest.h>

#include <numeric>

namespace torch_offload::test {
namespace {

// Every time lies within the bounds of its bin, and no bin of a time that is counted exactly is wider than an eighth of
// it. Method: both sides of each bound.
TEST(ReadTimes, BinsHaveTheTimesBetweenTheirBounds) {
    for (std::size_t bin = 1; bin < ReadTimes::kBinCount; ++bin) {
        const std::int64_t begin_ns = ReadTimes::begin_ns(bin);
        EXPECT_EQ(ReadTimes::bin_of(begin_ns), bin) << begin_ns;
        EXPECT_EQ(ReadTimes::bin_of(begin_ns - 1), bin - 1) << begin_ns;
        const std::int64_t end_ns = ReadTimes::begin_ns(bin + 1);
        EXPECT_LE((end_ns - begin_ns) * static_cast<std::int64_t>(ReadTimes::kBinsOfOctave), begin_ns);
    }
}

// What is out of all bounds counts in the bin at that end. Method: no time, a clock that went back, a year.
TEST(ReadTimes, WhatIsOutOfBoundsCounts) {
    ReadTimes times;
    times.note(std::chrono::nanoseconds(0));
    times.note(std::chrono::nanoseconds(-5));
    times.note(std::chrono::hours(24 * 365));
    const ReadTimes::Counts counts = times.counts();
    EXPECT_EQ(counts.front(), 2);
    EXPECT_EQ(counts.back(), 1);
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}), 3);
}

}  // namespace
}  // namespace torch_offload::test
