#include "pager/arena.h"

#include <gtest/gtest.h>

#include "base/units.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kUnit = 64 * kKiB;

// The limit is never exceeded, whatever asks. Method: fill with frames and ranges, ask for one more of each.
TEST(Arena, RefusesBeyondTheLimit) {
    Arena arena(4 * kUnit);
    ASSERT_TRUE(arena.try_take_frame(2 * kUnit));
    ASSERT_TRUE(arena.try_take_range(2 * kUnit));
    EXPECT_FALSE(arena.try_take_frame(kSectorBytes));
    EXPECT_FALSE(arena.try_take_range(kSectorBytes));
    EXPECT_EQ(arena.usage().used_bytes(), 4 * kUnit);
}

// Free memory of one size makes room for another size and kind. Method: give frames back, take a large range.
TEST(Arena, FreeMemoryServesOtherSizes) {
    Arena arena(4 * kUnit);
    const auto a = arena.try_take_frame(2 * kUnit);
    const auto b = arena.try_take_frame(2 * kUnit);
    arena.give_frame(*a);
    arena.give_frame(*b);
    EXPECT_EQ(arena.usage().available_bytes(), 4 * kUnit);
    EXPECT_TRUE(arena.try_take_range(4 * kUnit));
    EXPECT_EQ(arena.usage().free_frame_bytes, 0u);
    EXPECT_LE(arena.usage().peak_bytes, 4 * kUnit);
}

// Memory of the right size is reused where it lies. Method: give back, take again, compare addresses.
TEST(Arena, ReusesExactSizes) {
    Arena arena(4 * kUnit);
    const auto range = arena.try_take_range(kUnit);
    arena.give_range(*range);
    const auto again = arena.try_take_range(kUnit);
    EXPECT_EQ(again->data(), range->data());
    EXPECT_EQ(arena.usage().idle_range_bytes, 0u);
}

// Frames that the I/O engine has registered are not dropped behind its back. Method: register one, ask for its room.
TEST(Arena, RegisteredFramesAreLeftToTheirOwner) {
    Arena arena(2 * kUnit);
    auto frame = arena.try_take_frame(2 * kUnit);
    frame->fixed_index = 3;
    arena.give_frame(*frame);
    EXPECT_FALSE(arena.try_take_range(kUnit));
    const auto taken = arena.take_registered_free_frames(kUnit);
    ASSERT_EQ(taken.size(), 1u);
    arena.release_frame(taken[0]);
    EXPECT_TRUE(arena.try_take_range(kUnit));
}

}  // namespace
}  // namespace torch_offload::test
