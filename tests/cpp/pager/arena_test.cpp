#include "pager/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "device/address_space.h"
#include "support/gated_memory.h"
#include "support/refuse_system_call.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kUnit = 64 * kKiB;

/// An arena whose calls have its lock each.
class LockedArena : public Arena {
public:
    using Arena::Arena;

    std::optional<Frame> try_take_frame(std::size_t size_bytes) {
        ArenaLock lock(mutex_);
        return Arena::try_take_frame(size_bytes, lock);
    }
    bool add_free_frame(std::size_t kept_bytes) {
        ArenaLock lock(mutex_);
        return Arena::add_free_frame(kept_bytes, lock);
    }
    void give_frame(const Frame& frame) {
        ArenaLock lock(mutex_);
        Arena::give_frame(frame, lock);
    }
    std::optional<std::span<std::byte>> try_take_range(std::size_t size_bytes) {
        ArenaLock lock(mutex_);
        return Arena::try_take_range(size_bytes, lock);
    }
    void give_range(std::span<std::byte> range) {
        ArenaLock lock(mutex_);
        Arena::give_range(range, lock);
    }
    void take_back(std::span<std::byte> range) {
        ArenaLock lock(mutex_);
        Arena::take_back(range, lock);
    }
    void take_addresses_back(std::span<std::byte> range) {
        ArenaLock lock(mutex_);
        Arena::take_addresses_back(range, lock);
    }
    bool try_count_small(std::size_t size_bytes) {
        ArenaLock lock(mutex_);
        return Arena::try_count_small(size_bytes, lock);
    }

private:
    std::mutex mutex_;
};

/// An idle range, in each unit of which one byte is 7.
void leave_marked_range(LockedArena& arena, std::size_t size_bytes) {
    const auto range = arena.try_take_range(size_bytes);
    ASSERT_TRUE(range);
    for (std::size_t i = 1; i < range->size(); i += kUnit) (*range)[i] = std::byte{7};
    arena.give_range(*range);
}

/// How many sectors of memory lie at `range`, readable or not.
std::size_t sectors_at(std::span<std::byte> range) {
    std::vector<unsigned char> residency(range.size() / kSectorBytes);
    EXPECT_EQ(::mincore(range.data(), range.size(), residency.data()), 0);
    return static_cast<std::size_t>(std::count(residency.begin(), residency.end(), 1));
}

// The limit is never exceeded, whatever asks. Method: fill with frames and ranges, ask for one more of each.
TEST(Arena, RefusesBeyondTheLimit) {
    LockedArena arena({.limit_bytes = 4 * kUnit});
    ASSERT_TRUE(arena.try_take_frame(2 * kUnit));
    ASSERT_TRUE(arena.try_take_range(2 * kUnit));
    EXPECT_FALSE(arena.try_take_frame(kSectorBytes));
    EXPECT_FALSE(arena.try_take_range(kSectorBytes));
    EXPECT_EQ(arena.usage().used_bytes(), 4 * kUnit);
}

// Free memory of one size makes room for another size and kind. Method: give frames back, take a large range.
TEST(Arena, FreeMemoryServesOtherSizes) {
    LockedArena arena({.limit_bytes = 4 * kUnit});
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
    LockedArena arena({.limit_bytes = 4 * kUnit});
    const auto range = arena.try_take_range(kUnit);
    arena.give_range(*range);
    const auto again = arena.try_take_range(kUnit);
    EXPECT_EQ(again->data(), range->data());
    EXPECT_EQ(arena.usage().idle_range_bytes, 0u);
}

// Frames that are made ahead are of the size that is wanted, their memory is there, and as much is left as is asked
// for.
TEST(Arena, FramesAreMadeAhead) {
    LockedArena arena({.limit_bytes = 4 * kUnit, .page_bytes = 2 * kUnit});
    arena.note_wanted(kUnit);
    for (std::size_t made = 1; made <= 3; ++made) {
        EXPECT_TRUE(arena.add_free_frame(kUnit));
        EXPECT_EQ(arena.usage().free_frame_bytes, made * kUnit);
        EXPECT_EQ(arena.usage().frame_bytes, 0u);
    }
    EXPECT_FALSE(arena.add_free_frame(kUnit));
    const auto frame = arena.try_take_frame(kUnit);
    EXPECT_EQ(sectors_at(frame->slot), kUnit / kSectorBytes);
    EXPECT_EQ(arena.usage().free_frame_bytes, 2 * kUnit);
}

// Frames that the I/O engine has registered are not dropped behind its back. Method: register one, ask for its room.
TEST(Arena, RegisteredFramesAreLeftToTheirOwner) {
    LockedArena arena({.limit_bytes = 2 * kUnit});
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

// A range is made of the memory of free frames, not of new zeros. Method: mark two frames, give them back, take a range
// of two and a half.
TEST(Arena, RangesArePutTogetherFromFreeFrames) {
    LockedArena arena({.limit_bytes = 4 * kUnit, .page_bytes = kUnit});
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
    arena.give_range(*range);
}

// The other way round: where the budget is used up, frames are made of an idle range. Method: mark a range of two and a
// half frames, give it back, take frames.
TEST(Arena, IdleRangesAreTakenApartIntoFrames) {
    LockedArena arena({.limit_bytes = 3 * kUnit, .page_bytes = kUnit});
    leave_marked_range(arena, 2 * kUnit + kUnit / 2);
    const auto a = arena.try_take_frame(kUnit);
    EXPECT_EQ(arena.usage().free_frame_bytes, 0u);
    EXPECT_EQ(arena.usage().idle_range_bytes, kUnit + kUnit / 2);
    const auto b = arena.try_take_frame(kUnit);
    ASSERT_TRUE(a && b);
    EXPECT_EQ(a->slot[1], std::byte{7});
    EXPECT_EQ(b->slot[1], std::byte{7});
    EXPECT_LE(arena.usage().peak_bytes, 3 * kUnit);
    arena.give_frame(*a);
    arena.give_frame(*b);
}

// Frames of smaller pages serve as well, after the larger ones. Method: marked frames of one and of two units, a range
// of four and a half.
TEST(Arena, RangesArePutTogetherFromFramesOfSeveralSizes) {
    LockedArena arena({.limit_bytes = 6 * kUnit, .page_bytes = 2 * kUnit});
    std::vector<Frame> frames;
    for (const std::size_t size_bytes : {kUnit, 2 * kUnit, kUnit, kUnit}) {
        frames.push_back(*arena.try_take_frame(size_bytes));
        frames.back().slot[1] = size_bytes == kUnit ? std::byte{7} : std::byte{8};
    }
    for (const Frame& frame : frames) arena.give_frame(frame);
    const auto range = arena.try_take_range(4 * kUnit + kUnit / 2);
    ASSERT_TRUE(range);
    EXPECT_EQ((*range)[1], std::byte{8});
    EXPECT_EQ((*range)[2 * kUnit + 1], std::byte{7});
    EXPECT_EQ((*range)[3 * kUnit + 1], std::byte{7});
    EXPECT_EQ((*range)[4 * kUnit + 1], std::byte{0});
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    EXPECT_EQ(arena.usage().peak_bytes, 5 * kUnit + kUnit / 2);
    arena.give_range(*range);
}

// A range that is smaller than a free frame lies in it, where it is, and so do others. Method: mark a frame of two
// units in each half; two ranges of one.
TEST(Arena, FreeFramesAreDividedWhereTheyAre) {
    LockedArena arena({.limit_bytes = 2 * kUnit});
    const auto frame = arena.try_take_frame(2 * kUnit);
    for (std::size_t i = 1; i < 2 * kUnit; i += kUnit) frame->slot[i] = std::byte{7};
    arena.give_frame(*frame);
    const auto first = arena.try_take_range(kUnit);
    ASSERT_TRUE(first);
    EXPECT_EQ(first->data(), frame->slot.data());
    EXPECT_EQ(arena.usage().idle_range_bytes, kUnit);
    const auto second = arena.try_take_range(kUnit);
    ASSERT_TRUE(second);
    EXPECT_EQ(second->data(), frame->slot.data() + kUnit);
    EXPECT_EQ((*first)[1], std::byte{7});
    EXPECT_EQ((*second)[1], std::byte{7});
    arena.give_range(*first);
    arena.give_range(*second);
    EXPECT_EQ(arena.try_take_range(2 * kUnit)->data(), frame->slot.data());
}

// New memory for a small range is more than that where there is room, and the rest serves others. Method: two ranges;
// the second lies behind the first, and the peak does not grow.
TEST(Arena, SmallRangesShareABlock) {
    LockedArena arena({.limit_bytes = 512 * kUnit});
    const auto first = arena.try_take_range(kUnit);
    const std::size_t peak_bytes = arena.usage().peak_bytes;
    EXPECT_EQ(peak_bytes, 4 * kUnit);
    const auto second = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(first && second);
    EXPECT_EQ(second->data(), first->data() + kUnit);
    EXPECT_EQ(arena.usage().peak_bytes, peak_bytes);
    EXPECT_EQ(arena.usage().range_bytes, 3 * kUnit);
    arena.give_range(*first);
    arena.give_range(*second);
}

// Ranges of whole huge pages are not divided, whose parts the system would keep. Method: an idle one of two huge pages,
// a range of one unit; it lies elsewhere, and the first is found again by its size only.
TEST(Arena, HugeRangesAreNotDivided) {
    LockedArena arena({.limit_bytes = 4 * kHugePageBytes});
    const auto huge = arena.try_take_range(2 * kHugePageBytes);
    arena.give_range(*huge);
    const auto small = arena.try_take_range(kUnit);
    ASSERT_TRUE(small);
    EXPECT_FALSE(huge->data() <= small->data() && small->data() < huge->data() + huge->size());
    const auto again = arena.try_take_range(2 * kHugePageBytes);
    ASSERT_TRUE(again);
    EXPECT_EQ(again->data(), huge->data());
    arena.give_range(*again);
    arena.give_range(*small);
}

// Where the budget is used up, frames are made of a larger free one. Method: mark one of two units, take two of one.
TEST(Arena, FreeFramesAreTakenApart) {
    LockedArena arena({.limit_bytes = 2 * kUnit});
    const auto large = arena.try_take_frame(2 * kUnit);
    for (std::size_t i = 1; i < 2 * kUnit; i += kUnit) large->slot[i] = std::byte{7};
    arena.give_frame(*large);
    for (int i = 0; i < 2; ++i) {
        const auto frame = arena.try_take_frame(kUnit);
        ASSERT_TRUE(frame);
        EXPECT_EQ(frame->slot[1], std::byte{7});
        EXPECT_EQ(arena.usage().used_bytes(), 2 * kUnit);
    }
    EXPECT_EQ(arena.usage().peak_bytes, 2 * kUnit);
    EXPECT_FALSE(arena.try_take_frame(kSectorBytes));
}

// What an idle range of huge pages is taken apart into is of use to the pages that there are. Method: a range that was
// put together from a frame of one huge page, where two could be; mark it, take a shorter range and a frame.
TEST(Arena, IdleRangesBecomeFramesOfTheUsualSize) {
    constexpr std::size_t kHuge = kHugePageBytes;
    LockedArena arena({.limit_bytes = 3 * kHuge, .page_bytes = 2 * kHuge});
    arena.give_frame(*arena.try_take_frame(kHuge));
    leave_marked_range(arena, 3 * kHuge);
    const auto shorter = arena.try_take_range(2 * kHuge);
    ASSERT_TRUE(shorter);
    EXPECT_EQ((*shorter)[1], std::byte{7});
    EXPECT_EQ((*shorter)[kHuge + 1], std::byte{7});
    const auto frame = arena.try_take_frame(kHuge);
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->slot[1], std::byte{7});
    arena.give_range(*shorter);
    arena.give_frame(*frame);
}

// The smaller last page of a tensor does not make its size the usual one. Method: frames of two huge pages and then of
// one; an idle range of six becomes one of four and a frame of two.
TEST(Arena, LastPagesMakeNoSizeUsual) {
    constexpr std::size_t kHuge = kHugePageBytes;
    LockedArena arena({.limit_bytes = 9 * kHuge, .page_bytes = 2 * kHuge});
    arena.give_range(*arena.try_take_range(6 * kHuge));
    const auto page = arena.try_take_frame(2 * kHuge);
    const auto last_page = arena.try_take_frame(kHuge);
    ASSERT_TRUE(page && last_page);
    const auto range = arena.try_take_range(4 * kHuge);
    ASSERT_TRUE(range);
    EXPECT_EQ(arena.usage().free_frame_bytes, 2 * kHuge);
    EXPECT_EQ(arena.try_take_frame(2 * kHuge)->slot.size(), 2 * kHuge);
    EXPECT_EQ(arena.usage().peak_bytes, 9 * kHuge);
    arena.give_range(*range);
    arena.give_frame(*page);
    arena.give_frame(*last_page);
}

// Where memory is wanted, what has been idle for longest goes: a size that is used again and again stays. Method: an
// older and a newer idle range of different sizes, a frame that only fits in place of one; the larger one is newer,
// then older.
TEST(Arena, WhatHasBeenIdleForLongestGoesFirst) {
    for (const bool larger_is_newer : {true, false}) {
        LockedArena arena({.limit_bytes = 6 * kUnit, .page_bytes = kUnit});
        const auto small = arena.try_take_range(2 * kUnit);
        const auto large = arena.try_take_range(4 * kUnit);
        arena.give_range(larger_is_newer ? *small : *large);
        arena.give_range(larger_is_newer ? *large : *small);
        const auto frame = arena.try_take_frame(kUnit);
        ASSERT_TRUE(frame);
        const std::span<std::byte> newer = larger_is_newer ? *large : *small;
        const auto again = arena.try_take_range(newer.size());
        ASSERT_TRUE(again);
        EXPECT_EQ(again->data(), newer.data());
        arena.give_range(*again);
        arena.give_frame(*frame);
    }
}

// What the system does not let be taken out of a range goes back to it. Method: mremap is refused; what lies at the
// addresses, what is counted.
TEST(Arena, RangeThatCannotBeTakenApartIsGivenBack) {
    LockedArena arena({.limit_bytes = 3 * kUnit, .page_bytes = kUnit});
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
    EXPECT_EQ(sectors_at(range->first(kUnit)), 0u);
    EXPECT_EQ(sectors_at(range->subspan(kUnit)), 2 * kUnit / kSectorBytes);
    EXPECT_EQ(arena.usage().used_bytes(), 2 * kUnit);
    EXPECT_TRUE(arena.try_take_frame(3 * kUnit));
}

// Where the budget is used up, a range is put together from shorter ones that are idle. Method: two marked ones that
// are apart, one as long as both.
TEST(Arena, IdleRangesBecomeALongerOne) {
    LockedArena arena({.limit_bytes = 4 * kUnit});
    const auto a = arena.try_take_range(kUnit);
    const auto between = arena.try_take_range(kUnit);
    const auto b = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(a && between && b);
    for (std::size_t i = 1; i < 2 * kUnit; i += kUnit) (*b)[i] = std::byte{7};
    (*a)[1] = std::byte{7};
    arena.give_range(*a);
    arena.give_range(*b);
    const auto longer = arena.try_take_range(3 * kUnit);
    ASSERT_TRUE(longer);
    for (std::size_t i = 1; i < 3 * kUnit; i += kUnit) EXPECT_EQ((*longer)[i], std::byte{7}) << i;
    EXPECT_EQ(arena.usage().peak_bytes, 4 * kUnit);
    EXPECT_EQ(arena.usage().idle_range_bytes, 0u);
    arena.give_range(*longer);
    arena.give_range(*between);
}

// A range that cannot be had leaves what was gathered for it as it was. Method: the system has no memory for the rest.
TEST(Arena, WhatWasGatheredIsNotLost) {
    GatedMemory memory;
    LockedArena arena({.limit_bytes = 4 * kUnit, .memory = &memory});
    arena.give_frame(*arena.try_take_frame(kUnit));
    memory.refuse_one(GatedMemory::Call::commit);
    EXPECT_THROW(arena.try_take_range(3 * kUnit), OutOfTierMemory);
    EXPECT_EQ(arena.usage().range_bytes, 0u);
    EXPECT_EQ(arena.usage().available_bytes(), 4 * kUnit);
    EXPECT_TRUE(arena.try_take_range(4 * kUnit));
}

// The same where the system fails while it is gathered. Method: a small frame and an idle range of huge pages, which
// cannot be taken apart.
TEST(Arena, WhatWasGatheredBeforeAnErrorIsNotLost) {
    constexpr std::size_t kHuge = kHugePageBytes;
    GatedMemory memory;
    LockedArena arena({.limit_bytes = 3 * kHuge, .page_bytes = kHuge, .memory = &memory});
    arena.give_range(*arena.try_take_range(2 * kHuge));
    arena.give_frame(*arena.try_take_frame(kUnit));
    memory.refuse_one(GatedMemory::Call::move);
    EXPECT_THROW(arena.try_take_range(2 * kHuge + kHuge / 2), OutOfTierMemory);
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    EXPECT_EQ(arena.usage().range_bytes, 0u);
    EXPECT_TRUE(arena.try_take_frame(kUnit));
}

// Part of a block may be a segment's: it comes back with its memory, or without. Method: two parts of a block become
// pages; one returns as they are, the other after its memory has left; who gets which addresses.
TEST(Arena, PartsThatWereSegmentsComeBack) {
    AddressSpace& space = AddressSpace::process();
    LockedArena arena({.limit_bytes = 4 * kUnit});
    const auto first = arena.try_take_range(kUnit);
    const auto second = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(first && second);
    std::vector<Frame> frames;
    for (const auto& range : {*first, *second}) {
        EXPECT_TRUE(arena.has_range(range));
        frames.push_back(arena.adopt_into_frame(space.reserve(range.size(), nullptr)));
    }
    EXPECT_EQ(arena.usage().range_bytes, 0u);
    space.release(frames[0].slot);
    arena.return_to_range(frames[0]);
    arena.take_back(*first);
    EXPECT_EQ(arena.usage().idle_range_bytes, kUnit);
    space.move(*second, frames[1].slot.data(), Protection::read_write);
    arena.take_addresses_back(*second);
    arena.give_frame(frames[1]);
    EXPECT_FALSE(arena.has_range(*second));
    EXPECT_EQ(arena.usage().used_bytes(), 3 * kUnit);
    EXPECT_EQ(arena.try_take_range(kUnit)->data(), first->data());
    EXPECT_EQ(arena.try_take_range(2 * kUnit)->data(), frames[1].slot.data());
}

// What does not fit leaves the free frames as they were. Method: ask for more than there is while a frame is in use.
TEST(Arena, FramesStayFreeWhereTheRangeDoesNotFit) {
    LockedArena arena({.limit_bytes = 3 * kUnit, .reserve_bytes = kUnit, .page_bytes = kUnit});
    const auto free = arena.try_take_frame(kUnit);
    arena.give_frame(*free);
    EXPECT_FALSE(arena.try_take_range(3 * kUnit));
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    EXPECT_EQ(arena.try_take_frame(kUnit)->slot.data(), free->slot.data());
}

// Memory that is being made is counted already. Method: the system keeps one thread waiting for all there is, another
// asks for a little.
TEST(Arena, MemoryIsCountedBeforeItIsMade) {
    GatedMemory memory;
    LockedArena arena({.limit_bytes = 4 * kUnit, .memory = &memory});
    memory.shut(GatedMemory::Call::commit);
    auto first = std::async(std::launch::async, [&] { return arena.try_take_frame(4 * kUnit); });
    EXPECT_TRUE(memory.comes_to_wait());
    EXPECT_TRUE(arena.is_changing());
    auto second = std::async(std::launch::async, [&] { return arena.try_take_range(kUnit); });
    EXPECT_EQ(second.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    memory.open();
    EXPECT_TRUE(first.get());
    EXPECT_FALSE(second.get());
    EXPECT_FALSE(arena.is_changing());
}

// Memory that is being given back is counted until the system has it. Method: the system keeps one thread waiting that
// gives all there is back, another asks for a little.
TEST(Arena, MemoryIsCountedUntilItIsGivenBack) {
    GatedMemory memory;
    LockedArena arena({.limit_bytes = 4 * kUnit, .memory = &memory});
    arena.give_range(*arena.try_take_range(4 * kUnit));
    memory.shut(GatedMemory::Call::release);
    auto first = std::async(std::launch::async, [&] { return arena.try_count_small(4 * kUnit); });
    EXPECT_TRUE(memory.comes_to_wait());
    auto second = std::async(std::launch::async, [&] { return arena.try_take_frame(kUnit); });
    EXPECT_EQ(second.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    memory.open();
    EXPECT_TRUE(first.get());
    EXPECT_FALSE(second.get());
    EXPECT_EQ(arena.usage().used_bytes(), 4 * kUnit);
}

/// The process's memory, and how much of it was there at once: counted before it is made and after it is given back.
class CountedMemory final : public GatedMemory {
public:
    void commit(std::span<std::byte> range, HugePages huge_pages) override {
        {
            const std::lock_guard lock(mutex_);
            for (std::size_t i = 0; i < range.size(); i += kSectorBytes) there_.insert(&range[i]);
            most_bytes_ = std::max(most_bytes_, there_.size() * kSectorBytes);
        }
        std::this_thread::yield();
        GatedMemory::commit(range, huge_pages);
    }
    void move(std::span<std::byte> from, std::byte* to, Protection protection) override {
        GatedMemory::move(from, to, protection);
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < from.size(); i += kSectorBytes) {
            there_.erase(&from[i]);
            there_.insert(to + i);
        }
    }
    void decommit(std::span<std::byte> range) override {
        std::this_thread::yield();
        const std::lock_guard lock(mutex_);
        GatedMemory::decommit(range);
        for (std::size_t i = 0; i < range.size(); i += kSectorBytes) there_.erase(&range[i]);
    }
    void release(std::span<std::byte> range) noexcept override {
        std::this_thread::yield();
        const std::lock_guard lock(mutex_);  // before somebody else has the addresses
        GatedMemory::release(range);
        for (std::size_t i = 0; i < range.size(); i += kSectorBytes) there_.erase(&range[i]);
    }
    std::size_t most_bytes() const {
        const std::lock_guard lock(mutex_);
        return most_bytes_;
    }

private:
    mutable std::mutex mutex_;
    std::set<const std::byte*> there_;
    std::size_t most_bytes_ = 0;
};

/// Takes and gives frames and ranges of any size, and ends with nothing.
void use_a_little(LockedArena& arena, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<Frame> frames;
    std::vector<std::span<std::byte>> ranges;
    for (int step = 0; step < 400; ++step) {
        const std::size_t size_bytes = (1 + random() % 6) * kUnit / 2;
        switch (random() % 4) {
            case 0:
                if (const auto frame = arena.try_take_frame(size_bytes)) frames.push_back(*frame);
                break;
            case 1:
                if (const auto range = arena.try_take_range(size_bytes)) ranges.push_back(*range);
                break;
            case 2:
                if (frames.empty()) break;
                arena.give_frame(frames.back());
                frames.pop_back();
                break;
            default:
                if (ranges.empty()) break;
                arena.give_range(ranges.back());
                ranges.pop_back();
        }
    }
    for (const Frame& frame : frames) arena.give_frame(frame);
    for (const std::span<std::byte> range : ranges) arena.give_range(range);
}

// There is never more memory than the limit, whatever threads do at once, and the accounts end where they began.
// Method: threads that take and give at random, over a memory that counts itself.
TEST(Arena, ThreadsStayWithinTheLimitTogether) {
    for (const std::uint64_t seed : seeds({.usual = 10, .full = 200})) {
        CountedMemory memory;
        LockedArena arena({.limit_bytes = 8 * kUnit, .page_bytes = kUnit / 2 << seed % 3, .memory = &memory});
        std::vector<std::thread> threads;
        for (std::uint64_t i = 0; i < 4; ++i) threads.emplace_back([&, i] { use_a_little(arena, 4 * seed + i); });
        for (std::thread& thread : threads) thread.join();
        EXPECT_LE(memory.most_bytes(), 8 * kUnit) << "seed " << seed;
        EXPECT_LE(arena.usage().peak_bytes, 8 * kUnit) << "seed " << seed;
        EXPECT_EQ(arena.usage().available_bytes(), 8 * kUnit) << "seed " << seed;
        EXPECT_TRUE(arena.try_take_frame(8 * kUnit)) << "seed " << seed;
        EXPECT_EQ(arena.usage().used_bytes(), 8 * kUnit) << "seed " << seed;
    }
}

}  // namespace
}  // namespace torch_offload::test
