#include "pager/fault_holds.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

std::vector<std::uint32_t> pins_of(Segment& segment) {
    std::vector<std::uint32_t> pins;
    for (std::size_t i = 0; i < segment.page_count(); ++i) pins.push_back(segment.page(i).load().pin_count());
    return pins;
}

using Pins = std::vector<std::uint32_t>;

// So many pages are held as fit, the latest; a page is held once. Method: room for three pages of a segment of five.
TEST(FaultHolds, LatestPagesAreHeld) {
    Pager pager(options_with(16));
    const auto segment = pager.create_segment(5 * kPageBytes, 4, SegmentKind::other);
    FaultHolds holds(3 * kPageBytes);
    for (std::size_t i = 0; i < 3; ++i) holds.add(segment->page(i));
    holds.add(segment->page(1));
    EXPECT_EQ(pins_of(*segment), (Pins{1, 1, 1, 0, 0})) << "the second has a pin already";
    holds.add(segment->page(3));
    EXPECT_EQ(pins_of(*segment), (Pins{0, 1, 1, 1, 0}));
    EXPECT_TRUE(holds.drop_older_half());
    EXPECT_EQ(pins_of(*segment), (Pins{0, 0, 0, 1, 0}));
    EXPECT_TRUE(holds.drop_older_half());
    EXPECT_EQ(pins_of(*segment), Pins(5, 0));
    EXPECT_TRUE(holds.empty());
    EXPECT_FALSE(holds.drop_older_half());
}

// What goes with a segment are its own pages. Method: pages of two segments.
TEST(FaultHolds, PagesOfASegmentAreDropped) {
    Pager pager(options_with(16));
    const auto first = pager.create_segment(2 * kPageBytes, 4, SegmentKind::other);
    const auto second = pager.create_segment(2 * kPageBytes, 4, SegmentKind::other);
    FaultHolds holds(8 * kPageBytes);
    for (const auto& segment : {first, second}) holds.add(segment->page(1));
    EXPECT_TRUE(holds.drop(*first));
    EXPECT_FALSE(holds.drop(*first));
    EXPECT_EQ(pins_of(*first), (Pins{0, 0}));
    EXPECT_EQ(pins_of(*second), (Pins{0, 1}));
    EXPECT_TRUE(holds.drop_older_half());
    EXPECT_EQ(pins_of(*second), (Pins{0, 0}));
}

}  // namespace
}  // namespace torch_offload::test
