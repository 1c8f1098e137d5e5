#include "pager/served_uses.h"

#include <gtest/gtest.h>

namespace torch_offload::test {
namespace {

constexpr ProgramId kEvaluation = 1;

/// One step: three pages, a millisecond each, the middle one twice, and one more for the rest of the step.
void take_step(ServedUses& uses, std::int64_t begin_ns) {
    for (const std::uint64_t page : {0, 1, 2, 1}) uses.note_need(7, page, begin_ns += 1'000'000);
    uses.end_step(begin_ns + 1'000'000);
}

// A page is needed when it was in the pass before, and after its last need in the pass that follows. Method: two steps
// that are alike; in the third, what comes next from each place.
TEST(ServedUses, PassPredictsTheNext) {
    ServedUses uses;
    EXPECT_EQ(uses.next_need_ns(7, 0, 1), 0);
    uses.end_step(0);
    take_step(uses, 0);
    take_step(uses, 5'000'000);
    EXPECT_EQ(uses.pass_ns(), 5'000'000);
    const std::int64_t now = 11'000'000;
    uses.note_need(7, 0, now);
    EXPECT_EQ(uses.next_need_ns(7, 0, now), now + 1'000'000);  // for the page behind it
    EXPECT_EQ(uses.next_need_ns(7, 2, now), now + 2'000'000);
    uses.note_need(7, 1, now);
    uses.note_need(7, 2, now);
    EXPECT_EQ(uses.next_need_ns(7, 1, now), now + 1'000'000);
    uses.note_need(7, 1, now);
    EXPECT_EQ(uses.next_need_ns(7, 2, now), now + 4'000'000);  // in the step that follows: there is no page 3
    EXPECT_EQ(uses.next_need_ns(9, 4, now), now + 5'000'000);  // nothing is known of it
}

// A program that comes between steps is known again by its number. Method: a step, an evaluation of one page, a step.
TEST(ServedUses, ProgramsHaveRecordingsOfTheirOwn) {
    ServedUses uses;
    for (std::int64_t begin_ns = 0; begin_ns < 40'000'000; begin_ns += 20'000'000) {
        uses.begin_pass(kTraining, begin_ns);
        take_step(uses, begin_ns);
        uses.begin_pass(kEvaluation, begin_ns + 10'000'000);
        uses.note_need(3, 0, begin_ns + 12'000'000);
    }
    uses.begin_pass(kTraining, 40'000'000);
    take_step(uses, 40'000'000);
    EXPECT_EQ(uses.next_need_ns(3, 0, 45'000'000), 52'000'000);
    EXPECT_GT(uses.next_need_ns(7, 1, 45'000'000), 52'000'000);
}

// Who never says where passes begin has nothing recorded, however long it goes on.
TEST(ServedUses, WithoutPassesNothingIsRecorded) {
    ServedUses uses;
    for (std::int64_t i = 0; i < 1'000; ++i) uses.note_need(7, static_cast<std::uint64_t>(i % 5), i);
    uses.end_step(1'000);
    EXPECT_EQ(uses.next_need_ns(7, 0, 1'000), 0);
}

}  // namespace
}  // namespace torch_offload::test
