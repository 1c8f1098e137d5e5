#include "pager/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "device/address_space.h"
#include "support/refuse_system_call.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kUnit = 64 * kKiB;

/// How many sectors of memory lie at `range`, readable or not.
std::size_t sectors_at(std::span<std::byte> range) {
    std::vector<unsigned char> residency(range.size() / kSectorBytes);
    EXPECT_EQ(::mincore(range.data(), range.size(), residency.data()), 0);
    return static_cast<std::size_t>(std::count(residency.begin(), residency.end(), 1));
}

// The limit is never exceeded, whatever asks. Method: fill with frames and ranges, ask for one more of each.
TEST(Arena, RefusesBeyondTheLimit) {
    Arena arena({.limit_bytes = 4 * kUnit});
    ASSERT_TRUE(arena.try_take_frame(2 * kUnit));
    ASSERT_TRUE(arena.try_take_range(2 * kUnit));
    EXPECT_FALSE(arena.try_take_frame(kSectorBytes));
    EXPECT_FALSE(arena.try_take_range(kSectorBytes));
    EXPECT_EQ(arena.usage().used_bytes(), 4 * kUnit);
}

// Free memory of one size makes room for another size and kind. Method: give frames back, take a large range.
TEST(Arena, FreeMemoryServesOtherSizes) {
    Arena arena({.limit_bytes = 4 * kUnit});
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
    Arena arena({.limit_bytes = 4 * kUnit});
    const auto range = arena.try_take_range(kUnit);
    arena.give_range(*range);
    const auto again = arena.try_take_range(kUnit);
    EXPECT_EQ(again->data(), range->data());
    EXPECT_EQ(arena.usage().idle_range_bytes, 0u);
}

// Frames that the I/O engine has registered are not dropped behind its back. Method: register one, ask for its room.
TEST(Arena, RegisteredFramesAreLeftToTheirOwner) {
    Arena arena({.limit_bytes = 2 * kUnit});
    auto frame = arena.try_take_frame(2 * kUnit);
    ASSERT_TRUE(arena.expect_registered(2 * kUnit));
    frame->fixed_index = 3;
    arena.give_frame(*frame);
    EXPECT_FALSE(arena.try_take_range(kUnit));
    const auto taken = arena.take_registered_free_frames(kUnit);
    ASSERT_EQ(taken.size(), 1u);
    arena.give_frame(Frame{taken[0].slot});
    EXPECT_TRUE(arena.try_take_range(kUnit));
}

// A range is made of the memory of free frames, not of new zeros, and says which pages it can become. Method: mark two
// frames, give them back, take a range of two and a half.
TEST(Arena, RangesArePutTogetherFromFreeFrames) {
    Arena arena({.limit_bytes = 4 * kUnit, .piece_bytes = kUnit});
    const auto a = arena.try_take_frame(kUnit);
    const auto b = arena.try_take_frame(kUnit);
    a->slot[1] = std::byte{7};
    b->slot[1] = std::byte{7};
    arena.give_frame(*a);
    arena.give_frame(*b);
    const auto range = arena.try_take_range(2 * kUnit + kUnit / 2);
    ASSERT_TRUE(range);
    EXPECT_EQ((*range)[1], std::byte{7});
    EXPECT_EQ((*range)[kUnit + 1], std::byte{7});
    EXPECT_EQ((*range)[2 * kUnit + 1], std::byte{0});
    EXPECT_EQ(arena.usage().free_frame_bytes, 0u);
    EXPECT_EQ(arena.usage().peak_bytes, 2 * kUnit + kUnit / 2);
    EXPECT_TRUE(arena.can_become_pages(*range, kUnit));
    EXPECT_TRUE(arena.can_become_pages(*range, kUnit / 2));
    EXPECT_FALSE(arena.can_become_pages(*range, 2 * kUnit));
    arena.give_range(*range);
}

// The other way round: where the budget is used up, frames are made of an idle range. Method: mark a range of two and a
// half frames, give it back, take frames.
TEST(Arena, IdleRangesAreTakenApartIntoFrames) {
    Arena arena({.limit_bytes = 3 * kUnit, .piece_bytes = kUnit});
    const auto range = arena.try_take_range(2 * kUnit + kUnit / 2);
    for (std::size_t i = 1; i < range->size(); i += kUnit) (*range)[i] = std::byte{7};
    arena.give_range(*range);
    const auto a = arena.try_take_frame(kUnit);
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    EXPECT_EQ(arena.usage().idle_range_bytes, 0u);
    const auto b = arena.try_take_frame(kUnit);
    ASSERT_TRUE(a && b);
    EXPECT_EQ(a->slot[1], std::byte{7});
    EXPECT_EQ(b->slot[1], std::byte{7});
    EXPECT_LE(arena.usage().peak_bytes, 3 * kUnit);
    arena.give_frame(*a);
    arena.give_frame(*b);
}

// A range that the system does not let be taken apart goes back to it. Method: mremap is refused; what lies at the
// addresses, what is counted.
TEST(Arena, RangeThatCannotBeTakenApartIsGivenBack) {
    Arena arena({.limit_bytes = 3 * kUnit, .piece_bytes = kUnit});
    const auto range = arena.try_take_range(3 * kUnit);
    std::fill(range->begin(), range->end(), std::byte{7});
    arena.give_range(*range);
    ASSERT_EQ(sectors_at(*range), 3 * kUnit / kSectorBytes);
    bool is_refused = false;
    in_own_thread([&] {
        is_refused = refuse_system_call({.number = __NR_mremap, .error = ENOMEM});
        if (!is_refused) return;
        EXPECT_THROW(arena.try_take_frame(kUnit), OutOfTierMemory);
    });
    // Without filters of system calls (a kernel without seccomp) nothing makes a mapping fail: there is nothing to see.
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_EQ(sectors_at(*range), 0u);
    EXPECT_EQ(arena.usage().used_bytes(), 0u);
    EXPECT_TRUE(arena.try_take_frame(3 * kUnit));
}

// And ranges of one size become ranges of another by way of frames. Method: a marked idle range, a shorter one wanted.
TEST(Arena, IdleRangesBecomeOtherRanges) {
    Arena arena({.limit_bytes = 3 * kUnit, .piece_bytes = kUnit});
    const auto range = arena.try_take_range(3 * kUnit);
    for (std::size_t i = 1; i < range->size(); i += kUnit) (*range)[i] = std::byte{7};
    arena.give_range(*range);
    const auto shorter = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(shorter);
    EXPECT_EQ((*shorter)[1], std::byte{7});
    EXPECT_EQ((*shorter)[kUnit + 1], std::byte{7});
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    arena.give_range(*shorter);
}

// Pages that come back as a range are no single mapping any more. Method: hand a range over, take it back as pages.
TEST(Arena, RangeThatWasPagesKeepsTheirMappings) {
    Arena arena({.limit_bytes = 2 * kUnit});
    const auto range = arena.try_take_range(2 * kUnit);
    EXPECT_TRUE(arena.can_become_pages(*range, 2 * kUnit));
    arena.hand_over(*range);
    for (int page = 0; page < 2; ++page) {
        arena.return_to_range(arena.adopt_into_frame(AddressSpace::process().reserve(kUnit, nullptr)));
    }
    arena.take_back(*range, kUnit);
    const auto again = arena.try_take_range(2 * kUnit);
    ASSERT_EQ(again->data(), range->data());
    EXPECT_TRUE(arena.can_become_pages(*again, kUnit));
    EXPECT_FALSE(arena.can_become_pages(*again, 2 * kUnit));
    AddressSpace::process().release(*again);
}

// What does not fit leaves the free frames as they were. Method: ask for more than there is while a frame is in use.
TEST(Arena, FramesStayFreeWhereTheRangeDoesNotFit) {
    Arena arena({.limit_bytes = 3 * kUnit, .reserve_bytes = kUnit, .piece_bytes = kUnit});
    const auto free = arena.try_take_frame(kUnit);
    arena.give_frame(*free);
    EXPECT_FALSE(arena.try_take_range(3 * kUnit));
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    EXPECT_EQ(arena.try_take_frame(kUnit)->slot.data(), free->slot.data());
}

}  // namespace
}  // namespace torch_offload::test
