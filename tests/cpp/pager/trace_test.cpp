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
    EXPECT_EQ(trace.next_in_pass(1), kNever);
    EXPECT_FALSE(trace.upcoming(0).has_value());
}

// A recorded step predicts the next one, in it and into the following. Method: forward and backward over three roles.
TEST(Trace, PredictsFromTheStepBefore) {
    Trace trace;
    record(trace, {0, 1, 2, 1, 0});
    trace.end_step();
    EXPECT_EQ(trace.next_in_pass(2), 2u);
    record(trace, {0, 1, 2});
    EXPECT_EQ(trace.next_in_pass(1), 0u);
    EXPECT_EQ(trace.next_in_pass(2), kNever);
    EXPECT_EQ(trace.first_in_following(2), 4u);
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
    EXPECT_EQ(trace.next_in_pass(4), 0u);
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
    EXPECT_EQ(trace.next_in_pass(4), 0u);
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
// comes after the time of the whole step, the first of which begins with its first pin. Method: three pins with times,
// asked from the middle, in two steps.
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
    EXPECT_EQ(trace.upcoming(2)->after_ns, 100);  // role 0 of the following step
    EXPECT_EQ(trace.position_of(2), 3u);
    trace.touch(1, {350, 0});
    trace.touch(2, {390, 0});
    trace.end_step(400);
    trace.touch(0, {500, 0});
    EXPECT_EQ(trace.upcoming(2)->after_ns, 200);
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
    EXPECT_EQ(trace.next_in_pass(0), 0u);
}

constexpr ProgramId kDecode = 7;
constexpr ProgramId kEvaluate = 8;

/// A pass of the program with those uses; what comes then ends it.
void run(Trace& trace, ProgramId program, std::initializer_list<TraceId> ids) {
    trace.begin_pass(program);
    record(trace, ids);
}

// A program that only runs forward is predicted from its pass before, in the pass and into the next one. Method: the
// same three roles, three times.
TEST(Trace, PassWithoutAStepIsPredicted) {
    Trace trace;
    run(trace, kDecode, {0, 1, 2});
    EXPECT_FALSE(trace.has_prediction());
    run(trace, kDecode, {0, 1, 2});
    run(trace, kDecode, {0});
    EXPECT_FALSE(trace.is_training());
    EXPECT_EQ(trace.next_in_pass(2), 1u);
    EXPECT_EQ(trace.next_in_pass(0), kNever);
    EXPECT_EQ(trace.first_in_following(0), 2u);
    EXPECT_EQ(trace.upcoming(1)->id, TraceId{2});
    EXPECT_EQ(trace.upcoming(2)->id, TraceId{0});
    EXPECT_FALSE(trace.upcoming(3).has_value());
}

// Each program keeps its own prediction, and remembers what followed it last time: over several of them one can see
// what is used when. Method: steps of 0, 1, 2, 9 and evaluations of 5, 6 in turn, asked in either.
TEST(Trace, ProgramsAreForeseenOneAfterTheOther) {
    Trace trace;
    for (int i = 0; i < 2; ++i) {
        run(trace, kTraining, {0, 1, 2, 9});
        trace.end_step();
        run(trace, kEvaluate, {5, 6});
    }
    run(trace, kTraining, {0, 1});
    EXPECT_EQ(trace.next_in_pass(9), 1u);
    EXPECT_EQ(trace.next_in_pass(6), kNever);
    EXPECT_EQ(trace.first_in_following(6), 3u);
    EXPECT_EQ(trace.upcoming(2)->id, TraceId{5});
    EXPECT_EQ(trace.first_in_following(0), 4u);  // by way of the evaluation
    record(trace, {2, 9});
    trace.end_step();
    EXPECT_EQ(trace.upcoming(0)->id, TraceId{5});  // expected before it begins
    EXPECT_EQ(trace.first_in_following(9), 5u);
    EXPECT_FALSE(trace.begin_pass(kEvaluate));
    record(trace, {5});
    EXPECT_EQ(trace.next_in_pass(6), 0u);
}

// What no program that is foreseen uses is used last. Method: a state of training while one token follows the other.
TEST(Trace, ProgramThatFollowsItselfUsesNothingElse) {
    Trace trace;
    run(trace, kTraining, {0, 1, 9});
    trace.end_step();
    run(trace, kDecode, {0, 1});
    run(trace, kDecode, {0});
    EXPECT_EQ(trace.first_in_following(9), kNever);
    EXPECT_EQ(trace.first_in_following(0), 1u);
}

// A program that has not run yet is taken for the one before it, until it has. Method: a prompt, then two tokens.
TEST(Trace, NewProgramIsPredictedAsTheOneBefore) {
    constexpr ProgramId kPrefill = 6;
    Trace trace;
    run(trace, kPrefill, {0, 1, 2});
    run(trace, kPrefill, {0, 1, 2});
    run(trace, kDecode, {0});
    EXPECT_EQ(trace.next_in_pass(1), 0u);
    record(trace, {2});
    run(trace, kDecode, {0});
    EXPECT_EQ(trace.next_in_pass(1), kNever);
    EXPECT_EQ(trace.next_in_pass(2), 0u);
}

// The first pass of all is predicted to use what its caller expects, at once; what is recorded then counts for more.
// Method: an order that the pass does not keep to, and another one for a second program.
TEST(Trace, FirstPassIsExpected) {
    const std::vector<TraceId> order = {0, 1, 2};
    const std::vector<TraceId> reversed = {2, 1, 0};
    Trace trace;
    trace.expect(kDecode, order);
    EXPECT_FALSE(trace.has_prediction());  // of training
    trace.begin_pass(kDecode);
    EXPECT_EQ(trace.upcoming(2)->id, TraceId{2});
    EXPECT_EQ(trace.upcoming(2)->after_ns, 0);
    record(trace, {0});
    EXPECT_EQ(trace.next_in_pass(2), 1u);
    record(trace, {2, 1});
    trace.expect(kEvaluate, reversed);
    trace.begin_pass(kEvaluate);
    EXPECT_EQ(trace.upcoming(0)->id, TraceId{0});
    EXPECT_EQ(trace.upcoming(1)->id, TraceId{2});
}

// A module that calls a wrapped one begins one pass, not two. Method: two begin before anything is used.
TEST(Trace, PassThatHasUsedNothingGoesOn) {
    Trace trace;
    EXPECT_TRUE(trace.begin_pass(kDecode));
    EXPECT_FALSE(trace.begin_pass(kEvaluate));
    record(trace, {0, 1});
    run(trace, kDecode, {0});
    EXPECT_EQ(trace.next_in_pass(1), 0u);
}

// What is used between a step and the pass that follows is the start of that pass, and takes no program's prediction
// away. Method: one use after a step, whose program is expected again, then another program.
TEST(Trace, UsesAfterAStepBelongToThePassThatFollows) {
    Trace trace;
    record(trace, {0, 1, 2});
    trace.end_step();
    record(trace, {3});
    run(trace, kEvaluate, {5, 6});
    run(trace, kEvaluate, {3});
    EXPECT_EQ(trace.next_in_pass(5), 0u);
    trace.begin_pass(kTraining);
    EXPECT_EQ(trace.next_in_pass(1), 1u);
}

// What an optimizer's step ends was training, whatever it was taken for. Method: gradients that came by no forward.
TEST(Trace, StepEndsTraining) {
    Trace trace;
    run(trace, kEvaluate, {5, 6});
    run(trace, kEvaluate, {0, 1});
    trace.end_step();
    trace.begin_pass(kTraining);
    EXPECT_EQ(trace.next_in_pass(1), 1u);
    record(trace, {0, 1});
    trace.begin_pass(kEvaluate);
    EXPECT_EQ(trace.next_in_pass(6), 1u);
}

// Only so many programs are kept, and training among them. Method: one more than are kept, each once.
TEST(Trace, ProgramThatBeganLongestAgoIsForgotten) {
    Trace trace;
    record(trace, {0, 1});
    trace.end_step();
    for (ProgramId program = 1; program <= Trace::kMaxPrograms; ++program) {
        run(trace, program, {static_cast<TraceId>(10 + program)});
    }
    run(trace, Trace::kMaxPrograms, {});
    EXPECT_NE(trace.next_in_pass(10 + Trace::kMaxPrograms), kNever);
    record(trace, {40});
    trace.begin_pass(2);
    EXPECT_EQ(trace.next_in_pass(12), 0u);
    record(trace, {12});
    trace.begin_pass(1);  // predicted as the one before
    EXPECT_EQ(trace.next_in_pass(11), kNever);
    EXPECT_EQ(trace.next_in_pass(12), 0u);
    record(trace, {11});
    trace.begin_pass(kTraining);
    EXPECT_EQ(trace.next_in_pass(1), 1u);
}

}  // namespace
}  // namespace torch_offload::test
