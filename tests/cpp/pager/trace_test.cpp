#include "pager/trace.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace torch_offload::test {
namespace {

void record(Trace& trace, std::initializer_list<TraceId> ids) {
    for (const TraceId id : ids) trace.touch(id);
}

// Without a recording nothing is predicted. Method: touch, ask.
TEST(Trace, PredictsNothingInTheFirstStep) {
    Trace trace;
    record(trace, {0, 1, 2});
    EXPECT_FALSE(trace.has_prediction());
    EXPECT_EQ(trace.next_in_step(1), kNever);
    EXPECT_FALSE(trace.upcoming(0).has_value());
}

// A recorded step predicts the next one, in it and into the following. Method: forward and backward over three roles.
TEST(Trace, PredictsFromTheStepBefore) {
    Trace trace;
    record(trace, {0, 1, 2, 1, 0});
    trace.end_step();
    EXPECT_EQ(trace.next_in_step(2), 2u);
    record(trace, {0, 1, 2});
    EXPECT_EQ(trace.next_in_step(1), 0u);
    EXPECT_EQ(trace.next_in_step(2), kNever);
    EXPECT_EQ(trace.first_in_following_step(2), 4u);
    EXPECT_EQ(trace.upcoming(0)->id, TraceId{1});
    EXPECT_EQ(trace.upcoming(2)->id, TraceId{0});  // first of the following step
}

// Repeated pins of one role in a row are one. Method: record duplicates, look at the length.
TEST(Trace, JoinsRepeatedPins) {
    Trace trace;
    record(trace, {0, 0, 0, 1, 1});
    trace.end_step();
    EXPECT_EQ(trace.length(), 2u);
}

// A step that is written back from the recording is followed again where they meet. Method: skip a role, use an unknown
// one.
TEST(Trace, ResynchronisesAfterAWriteback) {
    Trace trace;
    record(trace, {0, 1, 2, 3, 4});
    trace.end_step();
    record(trace, {0, 7, 3});
    EXPECT_EQ(trace.next_in_step(4), 0u);
    EXPECT_EQ(trace.cursor(), 4u);
}

// A role used once more than recorded does not move the cursor to its next use far ahead. Method: two passes of 40.
TEST(Trace, RepeatedUseIsNotAJumpAhead) {
    Trace trace;
    for (int pass = 0; pass < 2; ++pass) {
        for (TraceId id = 0; id < 40; ++id) trace.touch(id);
    }
    trace.end_step();
    record(trace, {0, 1, 2, 1, 2, 0, 3});
    EXPECT_EQ(trace.cursor(), 4u);
    EXPECT_EQ(trace.next_in_step(4), 0u);
}

// A cursor that is far off finds its way. Method: skip from the start to the middle of a long recording.
TEST(Trace, FindsItsWayAfterALongWriteback) {
    Trace trace;
    for (TraceId id = 0; id < 200; ++id) trace.touch(id);
    trace.end_step();
    for (TraceId id = 100; id < 120; ++id) trace.touch(id);
    EXPECT_EQ(trace.cursor(), 120u);
}

// What is known of a pin to come is when, in computing time, and how much other memory it meets; the following step
// comes after the time of the whole step. Method: three pins with times, asked from the middle.
TEST(Trace, SaysWhenAndBesideWhat) {
    Trace trace;
    trace.touch(0, {100, 7});
    trace.touch(1, {150, 8});
    trace.touch(2, {190, 9});
    trace.end_step(200);
    trace.touch(0, {300, 0});
    const std::optional<UpcomingUse> third = trace.upcoming(1);
    ASSERT_TRUE(third.has_value());
    EXPECT_EQ(third->id, TraceId{2});
    EXPECT_EQ(third->after_ns, 90);
    EXPECT_EQ(third->other_bytes, 9u);
    EXPECT_EQ(trace.upcoming(2)->after_ns, 200);  // role 0 of the following step
    EXPECT_EQ(trace.position_of(2), 3u);
}

// A program that never ends a step takes no more and more memory: what is too long is not recorded, and predicts
// nothing; steps after it do. Method: two roles in turn, one pin more than is recorded.
TEST(Trace, StepsWithoutEndAreNotRecorded) {
    Trace trace;
    for (std::size_t i = 0; i <= Trace::kMaxUses; ++i) trace.touch(static_cast<TraceId>(i % 2));
    trace.end_step(1000);
    EXPECT_FALSE(trace.has_prediction());
    trace.touch(0, {1100, 0});
    trace.touch(1, {1150, 0});
    trace.end_step(1200);
    EXPECT_EQ(trace.length(), 2u);
    trace.touch(0, {1300, 0});
    EXPECT_EQ(trace.upcoming(0)->after_ns, 50);
}

// After one that is not recorded, the next is followed from its beginning in the recording before. Method: two roles, a
// step without end that uses only the first of them.
TEST(Trace, StepAfterOneWithoutEndBegins) {
    Trace trace;
    record(trace, {0, 1});
    trace.end_step(100);
    trace.touch(0);
    for (std::size_t i = 0; i <= Trace::kMaxUses; ++i) trace.touch(2 + static_cast<TraceId>(i % 2));
    ASSERT_EQ(trace.cursor(), 1u);
    trace.end_step(1000);
    EXPECT_EQ(trace.cursor(), 0u);
    EXPECT_EQ(trace.next_in_step(0), 0u);
}

}  // namespace
}  // namespace torch_offload::test
