#include "pager/stall_clock.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace torch_offload::test {
namespace {

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void spend(std::int64_t nanoseconds) {
    for (const std::int64_t end = now_ns() + nanoseconds; now_ns() < end;) {
    }
}

constexpr std::int64_t kSpentNs = 2'000'000;

// A nanosecond counts once, where it was spent. Method: a clock inside a clock; the sum is the time of both.
TEST(StallClock, InnerTimeIsNotCountedTwice) {
    Counter outer, inner;
    const std::int64_t start = now_ns();
    {
        const StallClock outer_clock(outer);
        spend(kSpentNs);
        {
            const StallClock inner_clock(inner);
            spend(kSpentNs);
        }
        spend(kSpentNs);
    }
    const auto total_ns = static_cast<std::uint64_t>(now_ns() - start);
    EXPECT_GE(inner.get(), static_cast<std::uint64_t>(kSpentNs));
    EXPECT_GE(outer.get(), static_cast<std::uint64_t>(2 * kSpentNs));
    EXPECT_LE(outer.get() + inner.get(), total_ns);
}

// What is counted is said to the log, piece by piece. Method: a clock inside a clock; pieces add up to the totals and
// follow each other.
TEST(StallClock, LogHoldsWhatIsCounted) {
    ActivityLog log;
    log.start(8);
    Counter outer, inner;
    {
        const StallClock outer_clock(outer, &log, ActivityLane::stall_update);
        spend(kSpentNs);
        const StallClock inner_clock(inner, &log, ActivityLane::stall_read);
        spend(kSpentNs);
    }
    const std::vector<Activity> pieces = log.copy().activities;
    ASSERT_EQ(pieces.size(), 3u);
    EXPECT_EQ(pieces[1].lane, ActivityLane::stall_read);
    EXPECT_EQ(static_cast<std::uint64_t>(pieces[1].end_ns - pieces[1].begin_ns), inner.get());
    EXPECT_EQ(static_cast<std::uint64_t>(pieces[0].end_ns - pieces[0].begin_ns + pieces[2].end_ns - pieces[2].begin_ns),
              outer.get());
    EXPECT_EQ(pieces[0].end_ns, pieces[1].begin_ns);
    EXPECT_EQ(pieces[1].end_ns, pieces[2].begin_ns);
}

// Threads of the engine wait for their own reasons. Method: a thread that is ignored runs a clock.
TEST(StallClock, EngineThreadsDoNotCount) {
    Counter total;
    std::thread([&] {
        StallClock::ignore_this_thread();
        const StallClock clock(total);
        spend(kSpentNs);
    }).join();
    EXPECT_EQ(total.get(), 0u);
}

}  // namespace
}  // namespace torch_offload::test
