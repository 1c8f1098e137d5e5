#include "pager/hints.h"

#include <gtest/gtest.h>

#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

// Of several hints at one segment the last counts, where it stands and for its bytes once. Method: one segment hinted
// at ten times, around another.
TEST(Hints, OfSeveralTheLastCounts) {
    Pager pager(options_with(8));
    const auto often = filled_segment(pager, 1, 1);
    const auto once = filled_segment(pager, 1, 2);
    Hints hints;
    Hints::Owners changed;
    const auto hint_at = [&](const std::shared_ptr<Segment>& segment, std::uint64_t now) {
        segment->last_use = now;
        hints.add(segment, now, changed);
    };
    for (std::uint64_t now = 1; now <= 9; ++now) hint_at(often, now);
    hint_at(once, 10);
    hint_at(often, 11);

    const Hints::Next first = hints.next(changed);
    EXPECT_EQ(first.segment, once);
    EXPECT_EQ(first.bytes_before, 0u);
    hints.read(once);
    const Hints::Next second = hints.next(changed);
    EXPECT_EQ(second.segment, often);
    EXPECT_EQ(second.bytes_before, kPageBytes);
    EXPECT_TRUE(changed.empty()) << "nothing was passed over or ended";
    hints.end(11, changed);
    EXPECT_EQ(changed.size(), 2u);
    EXPECT_EQ(often->awaited_since, 0u);
}

}  // namespace
}  // namespace torch_offload::test
