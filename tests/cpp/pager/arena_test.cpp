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
    void take_back(std::span<std::byte> range, std::size_t page_bytes) {
        ArenaLock lock(mutex_);
        Arena::take_back(range, page_bytes, lock);
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

// A range is made of the memory of free frames, not of new zeros, and says which pages it can become. Method: mark two
// frames, give them back, take a range of two and a half.
TEST(Arena, RangesArePutTogetherFromFreeFrames) {
    LockedArena arena({.limit_bytes = 4 * kUnit, .piece_bytes = kUnit});
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
    LockedArena arena({.limit_bytes = 3 * kUnit, .piece_bytes = kUnit});
    leave_marked_range(arena, 2 * kUnit + kUnit / 2);
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

// Frames of smaller pages serve as well, after the larger ones. Method: marked frames of one and of two units, a range
// of four and a half.
TEST(Arena, RangesArePutTogetherFromFramesOfSeveralSizes) {
    LockedArena arena({.limit_bytes = 6 * kUnit, .piece_bytes = 2 * kUnit});
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
    EXPECT_TRUE(arena.can_become_pages(*range, kUnit));
    EXPECT_FALSE(arena.can_become_pages(*range, 2 * kUnit));
    EXPECT_EQ(arena.movable_page_bytes(*range, 2 * kUnit), kUnit);
    EXPECT_EQ(arena.movable_page_bytes(*range, kUnit), kUnit);
    EXPECT_EQ(arena.movable_page_bytes(*range, 3 * kUnit), 0u);
    arena.give_range(*range);
}

// Frames that are smaller than usual are no pieces: a gradient could not become pages. Method: one of one unit beside
// two of two; a range of one unit is new memory.
TEST(Arena, FramesSmallerThanUsualAreNoPieces) {
    LockedArena arena({.limit_bytes = 8 * kUnit, .piece_bytes = 2 * kUnit});
    const auto a = arena.try_take_frame(2 * kUnit);
    const auto b = arena.try_take_frame(2 * kUnit);
    const auto last_page = arena.try_take_frame(kUnit);
    ASSERT_TRUE(a && b && last_page);
    last_page->slot[1] = std::byte{7};
    arena.give_frame(*last_page);
    const auto range = arena.try_take_range(kUnit);
    ASSERT_TRUE(range);
    EXPECT_EQ((*range)[1], std::byte{0});
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    arena.give_range(*range);
    for (const auto& frame : {a, b}) arena.give_frame(*frame);
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

// What an idle range is taken apart into is of use to the pages that there are. Method: a range that was put together
// from a frame of one unit, where two could be; mark it, take a shorter range and a frame.
TEST(Arena, IdleRangesBecomeFramesOfTheUsualSize) {
    LockedArena arena({.limit_bytes = 4 * kUnit, .piece_bytes = 2 * kUnit});
    arena.give_frame(*arena.try_take_frame(kUnit));
    leave_marked_range(arena, 3 * kUnit);
    const auto shorter = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(shorter);
    EXPECT_EQ((*shorter)[1], std::byte{7});
    EXPECT_EQ((*shorter)[kUnit + 1], std::byte{7});
    const auto frame = arena.try_take_frame(kUnit);
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->slot[1], std::byte{7});
    arena.give_range(*shorter);
    arena.give_frame(*frame);
}

// The smaller last page of a tensor does not make its size the usual one. Method: frames of one unit and then of half
// of one; an idle range becomes a shorter one, whose pages of one unit can move.
TEST(Arena, LastPagesMakeNoSizeUsual) {
    LockedArena arena({.limit_bytes = 5 * kUnit, .piece_bytes = 2 * kUnit});
    arena.give_range(*arena.try_take_range(3 * kUnit));
    const auto page = arena.try_take_frame(kUnit);
    const auto last_page = arena.try_take_frame(kUnit / 2);
    ASSERT_TRUE(page && last_page);
    const auto range = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(range);
    EXPECT_TRUE(arena.can_become_pages(*range, kUnit));
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    arena.give_range(*range);
    arena.give_frame(*page);
    arena.give_frame(*last_page);
}

// Where memory is wanted, what has been idle for longest goes: a size that is used again and again stays. Method: an
// older and a newer idle range of different sizes, a frame that only fits in place of one; the larger one is newer,
// then older.
TEST(Arena, WhatHasBeenIdleForLongestGoesFirst) {
    for (const bool larger_is_newer : {true, false}) {
        LockedArena arena({.limit_bytes = 5 * kUnit, .piece_bytes = kUnit});
        const auto small = arena.try_take_range(2 * kUnit);
        const auto large = arena.try_take_range(3 * kUnit);
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

// A range that the system does not let be taken apart goes back to it. Method: mremap is refused; what lies at the
// addresses, what is counted.
TEST(Arena, RangeThatCannotBeTakenApartIsGivenBack) {
    LockedArena arena({.limit_bytes = 3 * kUnit, .piece_bytes = kUnit});
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
    LockedArena arena({.limit_bytes = 3 * kUnit, .piece_bytes = kUnit});
    leave_marked_range(arena, 3 * kUnit);
    const auto shorter = arena.try_take_range(2 * kUnit);
    ASSERT_TRUE(shorter);
    EXPECT_EQ((*shorter)[1], std::byte{7});
    EXPECT_EQ((*shorter)[kUnit + 1], std::byte{7});
    EXPECT_EQ(arena.usage().free_frame_bytes, kUnit);
    arena.give_range(*shorter);
}

// Pages that come back as a range are no single mapping any more. Method: hand a range over, take it back as pages.
TEST(Arena, RangeThatWasPagesKeepsTheirMappings) {
    LockedArena arena({.limit_bytes = 2 * kUnit});
    const auto range = arena.try_take_range(2 * kUnit);
    EXPECT_TRUE(arena.can_become_pages(*range, 2 * kUnit));
    arena.hand_over(*range);
    for (int page = 0; page < 2; ++page) {
        const Frame frame = arena.adopt_into_frame(AddressSpace::process().reserve(kUnit, nullptr));
        AddressSpace::process().release(frame.slot);
        arena.return_to_range(frame);
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
    LockedArena arena({.limit_bytes = 3 * kUnit, .reserve_bytes = kUnit, .piece_bytes = kUnit});
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
    auto first = std::async(std::launch::async, [&] { return arena.try_count_small(kUnit); });
    EXPECT_TRUE(memory.comes_to_wait());
    auto second = std::async(std::launch::async, [&] { return arena.try_take_frame(kUnit); });
    EXPECT_EQ(second.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    memory.open();
    EXPECT_TRUE(first.get());
    EXPECT_FALSE(second.get());
    EXPECT_EQ(arena.usage().used_bytes(), kUnit);
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
        LockedArena arena({.limit_bytes = 8 * kUnit, .piece_bytes = kUnit / 2 << seed % 3, .memory = &memory});
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
