#include "pager/use_predictor.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

std::uint64_t total_stall_ns(const PagerStatistics& statistics) {
    return std::accumulate(std::begin(statistics.stall_ns), std::end(statistics.stall_ns), std::uint64_t{0});
}

constexpr std::int64_t kLongNs = 3'600'000'000'000;  // far more than a test takes

// Time in which the program waits for any of its tiers is none in which it computes. Method: two tiers that it is said
// to have waited for, an hour each, between a use and the next.
TEST(UsePredictor, ClockStandsStillWhileTheProgramWaitsForAnyTier) {
    UsePredictor predictor;
    const auto above = std::make_shared<StallTotals>();
    const auto below = std::make_shared<StallTotals>();
    predictor.leave_out(above);
    predictor.leave_out(below);
    predictor.hold().note_use(0, 0);
    above->ns[0].add(kLongNs);
    below->ns[1].add(kLongNs);
    EXPECT_LT(predictor.hold().since_last_ns(), -kLongNs);
    predictor.hold().note_use(1, 0);
    EXPECT_GE(predictor.hold().since_last_ns(), 0);
}

// What is noted is predicted in the next step, and who follows can tell what came since, and that a step has ended.
// Method: two steps of two roles.
TEST(UsePredictor, SaysWhatWasUsedSince) {
    UsePredictor predictor;
    predictor.hold().note_use(4, 7);
    predictor.hold().note_use(2, 9);
    EXPECT_EQ(predictor.hold()->recorded_count(), 2u);
    EXPECT_EQ(predictor.hold()->recorded(1), TraceId{2});
    EXPECT_FALSE(predictor.hold()->has_prediction());
    predictor.hold().end_step();
    EXPECT_EQ(predictor.hold().prediction_count(), 1u);
    EXPECT_EQ(predictor.hold()->recorded_count(), 0u);
    predictor.hold().note_use(4, 0);
    EXPECT_EQ(predictor.hold()->next_in_pass(2), 0u);
    EXPECT_EQ(predictor.hold()->upcoming(0)->other_bytes, 9u);
}

// A pager that follows adds nothing to the recording, and waiting for it is left out of the clock. Method: a segment of
// its own used there, evicted and pinned again, which waits for a read; the clock against that of the system.
TEST(UsePredictor, PagerThatFollowsRecordsNothing) {
    using Clock = std::chrono::steady_clock;
    const auto predictor = std::make_shared<UsePredictor>();
    Pager pager(options_with(8), std::make_unique<SimEngine>(8, 1));
    pager.follow(predictor);
    const auto segment = segment_with_role(pager, 4, 1);
    const Clock::time_point begin = Clock::now();
    predictor->hold().note_use(7, 0);
    pager.touch(segment);
    pager.end_step();
    EXPECT_EQ(predictor->hold()->recorded_count(), 1u);
    EXPECT_EQ(predictor->hold().prediction_count(), 0u);
    for (int i = 0; i < 1000 && total_stall_ns(pager.statistics()) == 0; ++i) {  // until one was not there at once
        ASSERT_EQ(pager.evict(segment), 0u);
        static_cast<void>(pin(pager, segment, Access::read));
    }
    const std::int64_t computed_ns = predictor->hold().since_last_ns();
    const auto passed_ns = std::chrono::nanoseconds(Clock::now() - begin).count();
    const auto waited_ns = static_cast<std::int64_t>(total_stall_ns(pager.statistics()));
    ASSERT_GT(waited_ns, 0);
    EXPECT_LE(computed_ns, passed_ns - waited_ns);
}

// Who follows can tell that another program runs, and no more of a module that another one calls. Method: two programs
// in turn, one of which begins twice.
TEST(UsePredictor, SaysThatAnotherProgramRuns) {
    UsePredictor predictor;
    EXPECT_TRUE(predictor.hold().begin_pass(1));
    EXPECT_FALSE(predictor.hold().begin_pass(2));
    predictor.hold().note_use(4, 7);
    EXPECT_TRUE(predictor.hold().begin_pass(2));
    EXPECT_EQ(predictor.hold().prediction_count(), 2u);
    EXPECT_EQ(predictor.hold()->next_in_pass(4), 0u);
}

}  // namespace
}  // namespace torch_offload::test
