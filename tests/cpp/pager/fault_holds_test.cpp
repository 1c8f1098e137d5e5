#include "pager/fault_holds.h"

#include <gtest/gtest.h>

#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

// So many pages are held as fit, the latest; a page is held once. Method: room for three pages of a segment of five.
TEST(FaultHolds, LatestPagesAreHeld) {
    Pager pager(options_with(16));
    const auto segment = pager.create_segment(5 * kPageBytes, 4, SegmentKind::other);
    FaultHolds holds(3 * kPageBytes);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(holds.add(segment->page(i)).empty());
    EXPECT_EQ(holds.add(segment->page(1)), std::vector<Page*>{&segment->page(1)}) << "it has a pin already";
    EXPECT_EQ(holds.add(segment->page(3)), std::vector<Page*>{&segment->page(0)});
    const std::vector<Page*> older{&segment->page(1), &segment->page(2)};
    EXPECT_EQ(holds.take_older_half(), older);
    EXPECT_EQ(holds.take_older_half(), std::vector<Page*>{&segment->page(3)});
    EXPECT_TRUE(holds.empty());
    EXPECT_TRUE(holds.take_older_half().empty());
}

// What goes with a segment are its own pages. Method: pages of two segments.
TEST(FaultHolds, PagesOfASegmentAreTaken) {
    Pager pager(options_with(16));
    const auto first = pager.create_segment(2 * kPageBytes, 4, SegmentKind::other);
    const auto second = pager.create_segment(2 * kPageBytes, 4, SegmentKind::other);
    FaultHolds holds(8 * kPageBytes);
    for (const auto& segment : {first, second}) EXPECT_TRUE(holds.add(segment->page(1)).empty());
    EXPECT_EQ(holds.take(*first), std::vector<Page*>{&first->page(1)});
    EXPECT_TRUE(holds.take(*first).empty());
    EXPECT_EQ(holds.take_older_half(), std::vector<Page*>{&second->page(1)});
}

}  // namespace
}  // namespace torch_offload::test
