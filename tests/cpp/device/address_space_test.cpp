#include "device/address_space.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "support/address_space_fixture.h"
#include "support/refuse_system_call.h"
#include "support/sanitized.h"
#include "support/sanitizer_options.h"

namespace torch_offload::test {
namespace {

// Reserved addresses are whole sectors, aligned, inside the arena and empty. Method: three sizes around the borders.
TEST(AddressSpaceReserve, GivesEmptyAlignedSectors) {
    for (const std::size_t size : {std::size_t{1}, kHugePageBytes - 1, 3 * kHugePageBytes + 5}) {
        const Range range(size);
        EXPECT_EQ(range.bytes().size(), round_up(size, kSectorBytes));
        const std::size_t alignment = size < kHugePageBytes ? kSectorBytes : kHugePageBytes;
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(range.begin()) % alignment, 0u);
        EXPECT_TRUE(space().contains(range.begin()));
        EXPECT_TRUE(space().contains(&range.bytes().back()));
        EXPECT_FALSE(is_readable(range.begin()));
        EXPECT_FALSE(is_readable(&range.bytes().back()));
    }
    EXPECT_FALSE(space().contains(&space()));
    EXPECT_THROW(space().reserve(0, nullptr), InvalidArgument);
    EXPECT_THROW(space().reserve(~std::size_t{0}, nullptr), OutOfTierMemory);
}

// Released addresses come back for the next range of that size, without memory or target. Method: reserve, commit,
// write, release, reserve.
TEST(AddressSpaceReserve, ReleasedAddressesAreReusedEmpty) {
    ScriptedTarget target([] {});
    const std::span<std::byte> first = space().reserve(kFrameBytes, &target);
    space().commit(first);
    fill(first, 1);
    space().release(first);
    const Range second(kFrameBytes);
    EXPECT_EQ(second.begin(), first.data());
    EXPECT_FALSE(is_readable(second.begin()));
    space().commit(second.bytes());
    EXPECT_EQ(std::ranges::count(second.bytes(), std::byte{0}), static_cast<std::ptrdiff_t>(kFrameBytes));
    EXPECT_EQ(target.count(), 0);
}

// Releasing what was not reserved changes nothing. Method: a part, then the whole twice; another range stays intact.
TEST(AddressSpaceReserve, WrongReleaseIsRefused) {
    const std::span<std::byte> range = space().reserve(2 * kFrameBytes, nullptr);
    space().commit(range);
    fill(range, 1);
    const std::vector<std::byte> before = copy_of(range);
    space().release(range.first(kFrameBytes));
    EXPECT_EQ(copy_of(range), before);
    space().release(range);
    const Range next(2 * kFrameBytes);
    space().commit(next.bytes());
    const Range other(2 * kFrameBytes);
    EXPECT_NE(other.begin(), next.begin());
}

// Calls outside reserved addresses or off the sectors are refused before any system call. Method: foreign memory.
TEST(AddressSpaceReserve, ForeignMemoryIsRefused) {
    alignas(kSectorBytes) static std::array<std::byte, kSectorBytes> foreign{};
    const Range range(kFrameBytes);
    EXPECT_THROW(space().commit(foreign), LogicError);
    EXPECT_THROW(space().decommit(foreign), LogicError);
    EXPECT_THROW(space().move(range.bytes().first(kSectorBytes), foreign.data(), Protection::read), LogicError);
    EXPECT_THROW(space().move(foreign, range.begin(), Protection::read), LogicError);
    EXPECT_THROW(space().commit(range.bytes().subspan(1, kSectorBytes)), LogicError);
    EXPECT_THROW(space().commit(range.bytes().first(1)), LogicError);
    EXPECT_THROW(space().move(range.bytes().first(2 * kSectorBytes), range.begin() + kSectorBytes, Protection::read),
                 LogicError);
    EXPECT_THROW(space().set_target(foreign, nullptr), LogicError);
}

// Committed memory is zeros that can be written; decommitted memory is gone. Method: write, decommit, look, commit.
TEST(AddressSpaceCommit, IsZerosAndDecommitDropsThem) {
    const Range range(kFrameBytes + kSectorBytes);
    space().commit(range.bytes());
    EXPECT_EQ(load(&range.bytes().back()), std::byte{0});
    fill(range.bytes(), 1);
    space().decommit(range.bytes());
    EXPECT_FALSE(is_readable(range.begin()));
    EXPECT_EQ(smaps_bytes(range.bytes(), "Rss"), 0u);
    space().commit(range.bytes());
    EXPECT_EQ(std::ranges::count(range.bytes(), std::byte{0}), static_cast<std::ptrdiff_t>(range.bytes().size()));
}

// Huge pages are asked for where they are allowed and fit, and nowhere else. Method: the flag that the system keeps;
// whether it then has huge pages to give is its own affair.
TEST(AddressSpaceCommit, AsksForHugePages) {
    if (::access("/sys/kernel/mm/transparent_hugepage", F_OK) != 0) GTEST_SKIP() << "a kernel without huge pages";
    constexpr std::string_view kAsked = "hg";
    const Range allowed(16 * kMiB);
    space().commit(allowed.bytes());
    EXPECT_TRUE(has_flag(allowed.bytes(), kAsked));
    const Range forbidden(16 * kMiB);
    space().commit(forbidden.bytes(), HugePages::never);
    EXPECT_FALSE(has_flag(forbidden.bytes(), kAsked));
    const Range small(kHugePageBytes - kSectorBytes);
    space().commit(small.bytes());
    EXPECT_FALSE(has_flag(small.bytes(), kAsked));
}

class AddressSpaceMove : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, AddressSpaceMove,
                         testing::Values(kSectorBytes, kMiB, kFrameBytes, kFrameBytes - kSectorBytes));

// Moved bytes are the same bytes, at one address. Method: there read-only and back, compared; EFAULT where they left.
TEST_P(AddressSpaceMove, KeepsBytesAndLeavesNothingBehind) {
    const Range slot(GetParam());
    const Range segment(GetParam());
    space().commit(slot.bytes());
    fill(slot.bytes(), GetParam());
    const std::vector<std::byte> before = copy_of(slot.bytes());
    space().move(slot.bytes(), segment.begin(), Protection::read);
    EXPECT_FALSE(is_readable(slot.begin()));
    EXPECT_FALSE(is_readable(&slot.bytes().back()));
    EXPECT_EQ(copy_of(segment.bytes()), before);
    space().move(segment.bytes(), slot.begin(), Protection::read_write);
    EXPECT_FALSE(is_readable(segment.begin()));
    EXPECT_EQ(copy_of(slot.bytes()), before);
    store(slot.begin(), ~before.front());
    EXPECT_EQ(load(slot.begin()), ~before.front());
}

// A move to Protection::none uncovers nothing until protect() does. Method: EFAULT before, equal bytes after.
TEST_P(AddressSpaceMove, CanArriveCovered) {
    const Range slot(GetParam());
    const Range segment(GetParam());
    space().commit(slot.bytes());
    fill(slot.bytes(), GetParam());
    const std::vector<std::byte> before = copy_of(slot.bytes());
    space().move(slot.bytes(), segment.begin(), Protection::none);
    EXPECT_FALSE(is_readable(segment.begin()));
    space().protect(segment.bytes(), Protection::read);
    EXPECT_EQ(copy_of(segment.bytes()), before);
}

// Memory that nobody uses can be written where it arrives, and its old addresses can be given up and had again. Method:
// there, a write, the old ones released while the new ones are read.
TEST_P(AddressSpaceMove, OfUnusedMemoryArrivesWritable) {
    const Range there(GetParam());
    std::vector<std::byte> before;
    {
        const Range here(GetParam());
        space().commit(here.bytes());
        fill(here.bytes(), GetParam());
        before = copy_of(here.bytes());
        space().move_unused(here.bytes(), there.begin());
        EXPECT_EQ(smaps_bytes(here.bytes(), "Rss"), 0u);
        EXPECT_THROW(space().move_unused(here.bytes(), here.begin()), LogicError);
    }
    EXPECT_EQ(copy_of(there.bytes()), before);
    store(there.begin(), ~before.front());
    EXPECT_EQ(load(there.begin()), ~before.front());
}

// Memory is resident at one address and is counted once. Method: RSS before and after moving 64 MiB, and at both ends.
TEST(AddressSpaceMoveMany, CountsEveryByteOnce) {
    constexpr std::size_t kTotalBytes = 64 * kMiB;
    const Range slots(kTotalBytes);
    const Range segments(kTotalBytes);
    space().commit(slots.bytes());
    fill(slots.bytes(), 1);
    const std::byte sum_before = sum_of_sectors(slots.bytes());
    const std::size_t before = resident_bytes();
    for (std::size_t offset = 0; offset < kTotalBytes; offset += kFrameBytes) {
        space().move(slots.bytes().subspan(offset, kFrameBytes), segments.begin() + offset, Protection::read);
    }
    const std::byte sum = sum_of_sectors(segments.bytes());
    EXPECT_EQ(sum, sum_before);
    if (!kSanitized) {
        EXPECT_LT(resident_bytes(), before + 4 * kMiB);  // a sanitizer's shadow is resident too
    }
    EXPECT_EQ(smaps_bytes(slots.bytes(), "Rss"), 0u);
    EXPECT_EQ(smaps_bytes(segments.bytes(), "Rss"), kTotalBytes);
}

/// Two ranges of different sizes that arrived at `joined` one after the other: two mappings. Returns their bytes.
std::vector<std::byte> join_two(const Range& joined, std::size_t first_bytes) {
    std::byte* to = joined.begin();
    for (const std::size_t size_bytes : {first_bytes, joined.bytes().size() - first_bytes}) {
        const Range part(size_bytes);
        space().commit(part.bytes());
        fill(part.bytes(), reinterpret_cast<std::uintptr_t>(part.begin()));
        space().move(part.bytes(), to, Protection::read_write);
        to += size_bytes;
    }
    return copy_of(joined.bytes());
}

// Neighbors that arrived one by one leave as one range, and so does what begins within one and ends within the other.
// Method: move them, and a part that has the border inside.
TEST(AddressSpaceMoveMany, SeveralMappingsMoveAsOne) {
    const Range joined(2 * kMiB);
    const Range target(2 * kMiB);
    const std::vector<std::byte> before = join_two(joined, kMiB / 2);
    space().move(joined.bytes(), target.begin(), Protection::read);
    EXPECT_FALSE(is_readable(joined.begin()));
    EXPECT_EQ(copy_of(target.bytes()), before);
    const Range part(kMiB);
    space().protect(target.bytes(), Protection::read_write);
    space().move_unused(target.bytes().subspan(kMiB / 4, kMiB), part.begin());
    const auto begin = before.begin() + static_cast<std::ptrdiff_t>(kMiB / 4);
    EXPECT_EQ(copy_of(part.bytes()), std::vector<std::byte>(begin, begin + static_cast<std::ptrdiff_t>(kMiB)));
}

/// A range that arrived in pieces of that size, moved as memory that nobody uses; returns whether its bytes came along.
bool comes_along(std::size_t piece_bytes) {
    const Range joined(kMiB);
    for (std::byte* to = joined.begin(); to < joined.begin() + kMiB; to += piece_bytes) {
        const Range piece(piece_bytes);
        space().commit(piece.bytes());
        fill(piece.bytes(), 1);
        space().move(piece.bytes(), to, Protection::read_write);
    }
    const std::vector<std::byte> before = copy_of(joined.bytes());
    const Range target(kMiB);
    space().move_unused(joined.bytes(), target.begin());
    EXPECT_EQ(smaps_bytes(joined.bytes(), "Rss"), 0u);
    const std::vector<std::byte> after = copy_of(target.bytes());
    fill(target.bytes(), 2);
    EXPECT_EQ(smaps_bytes(target.bytes(), "Rss"), kMiB);
    EXPECT_TRUE(after == before || after == std::vector<std::byte>(kMiB));
    return after == before;
}

// Unused memory in so many pieces that each move would take long is made anew, and resident once. Method: a mebibyte in
// pieces of two sizes; new memory is zero.
TEST(AddressSpaceMoveMany, UnusedMemoryInSmallPiecesIsMadeAnew) {
    EXPECT_TRUE(comes_along(256 * kKiB));
    EXPECT_FALSE(comes_along(128 * kKiB));
}

// If one of the mappings cannot move, all of them are where they were. Method: the system refuses to move the second.
TEST(AddressSpaceMoveMany, SeveralMappingsMoveWholeOrNotAtAll) {
    constexpr std::size_t kSecondBytes = kMiB / 4;
    const Range joined(2 * kMiB);
    const Range target(2 * kMiB);
    const std::vector<std::byte> before = join_two(joined, joined.bytes().size() - kSecondBytes);
    bool is_refused = false;
    in_own_thread([&] {
        is_refused = refuse_system_call(
            {.number = __NR_mremap, .error = ENOMEM, .argument = 1, .mask = ~0u, .value = kSecondBytes});
        if (!is_refused) return;
        EXPECT_THROW(space().move(joined.bytes(), target.begin(), Protection::read), OutOfTierMemory);
    });
    // Without filters of system calls (a kernel without seccomp) nothing makes a move fail: there is nothing to see.
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_FALSE(is_readable(target.begin()));
    space().protect(joined.bytes(), Protection::read);
    EXPECT_EQ(copy_of(joined.bytes()), before);
}

// A fault is told to the target with its address and kind, and the access then happens. Method: a load and a store.
TEST(AddressSpaceFault, IsAnsweredAndRepeated) {
    std::span<std::byte> bytes;
    ScriptedTarget target([&] { space().protect(bytes, Protection::read_write); });
    const Range range(kFrameBytes, &target);
    bytes = range.bytes();
    const std::uint64_t count_before = space().fault_count();

    errno = 4711;
    EXPECT_EQ(load(range.begin() + 12345), std::byte{0});
    EXPECT_EQ(errno, 4711);
    EXPECT_EQ(target.address(), range.begin() + 12345);
    EXPECT_FALSE(target.was_write());

    space().protect(bytes, Protection::none);
    store(&bytes.back(), std::byte{7});
    EXPECT_EQ(target.address(), &bytes.back());
    EXPECT_TRUE(target.was_write());
    EXPECT_EQ(load(&bytes.back()), std::byte{7});
    EXPECT_EQ(target.count(), 2);
    EXPECT_EQ(space().fault_count() - count_before, 2u);
}

// Reading a clean page tells nobody, writing it does. Method: a read-only arrival, one load, one store.
TEST(AddressSpaceFault, WriteToReadOnlyMemoryIsSeen) {
    std::span<std::byte> bytes;
    ScriptedTarget target([&] { space().protect(bytes, Protection::read_write); });
    const Range slot(kFrameBytes);
    const Range segment(kFrameBytes, &target);
    bytes = segment.bytes();
    space().commit(slot.bytes());
    space().move(slot.bytes(), segment.begin(), Protection::read);
    EXPECT_EQ(load(segment.begin()), std::byte{0});
    EXPECT_EQ(target.count(), 0);
    store(segment.begin(), std::byte{1});
    EXPECT_TRUE(target.was_write());
    EXPECT_EQ(target.count(), 1);
}

// The target can be changed while the range lives. Method: a fault before and after set_target.
TEST(AddressSpaceFault, GoesToTheTargetSetLast) {
    std::span<std::byte> bytes;
    ScriptedTarget first([&] { space().protect(bytes, Protection::read); });
    ScriptedTarget second([&] { space().protect(bytes, Protection::read); });
    const Range range(3 * kSectorBytes, &first);
    bytes = range.bytes();
    load(range.begin());
    space().protect(bytes, Protection::none);
    space().set_target(bytes, &second);
    load(range.begin());
    EXPECT_EQ(first.count(), 1);
    EXPECT_EQ(second.count(), 1);
}

// A poisoned range reads 0xFF everywhere and never anything else. Method: poison from the handler, a second reader.
TEST(AddressSpaceFault, PoisonEndsAnAccess) {
    std::span<std::byte> bytes;
    std::atomic<bool> poisoned{false};
    ScriptedTarget target([&] {
        if (!poisoned.exchange(true)) space().poison(bytes);
    });
    const Range range(kFrameBytes, &target);
    bytes = range.bytes();
    std::thread reader([&] { EXPECT_EQ(load(&bytes.back()), std::byte{0xFF}); });
    EXPECT_EQ(load(bytes.data()), std::byte{0xFF});
    reader.join();
    EXPECT_EQ(std::ranges::count(bytes, std::byte{0xFF}), static_cast<std::ptrdiff_t>(bytes.size()));
}

/// Pages that live at a slot or at their address in a segment; a fault has a thread bring them in, as the pager's does,
/// `evict` takes them out. The state word of each decides who moves it.
class PageSet : public FaultTarget {
public:
    PageSet(std::size_t page_count, std::size_t page_bytes)
        : page_bytes_(page_bytes),
          states_(page_count),
          wanted_(page_count),
          slots_(page_count * page_bytes),
          segment_(page_count * page_bytes, this) {
        space().commit(slots_.bytes());
        for (std::size_t page = 0; page < page_count; ++page) {
            const auto pattern = static_cast<std::byte>(page + 1);
            std::ranges::fill(slots_.bytes().subspan(page * page_bytes, page_bytes), pattern);
        }
        mover_ = std::jthread([this](const std::stop_token& stop) { bring_in(stop); });
    }

    void resolve_fault(std::byte* address, bool) noexcept override {
        std::atomic<bool>& wanted = wanted_[static_cast<std::size_t>(address - segment_.begin()) / page_bytes_];
        wanted = true;
        while (wanted) sched_yield();
    }

    bool evict(std::size_t page) noexcept { return transit(page, State::at_segment, State::at_slot); }

    std::size_t page_count() const { return states_.size(); }
    std::size_t page_bytes() const { return page_bytes_; }
    std::byte* page_begin(std::size_t page) const { return segment_.begin() + page * page_bytes_; }
    int moves_in() const { return moves_in_; }

private:
    enum class State { at_slot, moving, at_segment };

    /// Until `stop`, what faults ask for.
    void bring_in(const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            for (std::size_t page = 0; page < wanted_.size(); ++page) {
                if (!wanted_[page]) continue;
                transit(page, State::at_slot, State::at_segment);
                wanted_[page] = false;
            }
            std::this_thread::yield();
        }
    }

    /// True if this thread moved the page. If another one is moving it the access just comes again.
    bool transit(std::size_t page, State from, State to) noexcept {
        State expected = from;
        if (!states_[page].compare_exchange_strong(expected, State::moving)) return false;
        const std::span<std::byte> slot = slots_.bytes().subspan(page * page_bytes_, page_bytes_);
        const std::span<std::byte> address = segment_.bytes().subspan(page * page_bytes_, page_bytes_);
        if (to == State::at_segment) {
            space().move(slot, address.data(), Protection::read);
            ++moves_in_;
        } else {
            space().move(address, slot.data(), Protection::read_write);
        }
        states_[page] = to;
        return true;
    }

    std::size_t page_bytes_;
    std::vector<std::atomic<State>> states_;
    std::vector<std::atomic<bool>> wanted_;
    Range slots_;
    Range segment_;
    std::atomic<int> moves_in_{0};
    std::jthread mover_;  // ends first
};

// Threads that fault on one page at once bring it in once. Method: two threads, released together, 200 rounds.
TEST(AddressSpaceThreads, TwoFaultsOnOnePageMoveItOnce) {
    constexpr int kRounds = 200;
    PageSet pages(1, kMiB);
    std::barrier together(2);
    const auto reader = [&](const std::byte* address, bool evicts) {
        for (int round = 0; round < kRounds; ++round) {
            together.arrive_and_wait();
            EXPECT_EQ(load(address), std::byte{1});
            together.arrive_and_wait();
            if (evicts) {
                EXPECT_TRUE(pages.evict(0));
            }
        }
    };
    std::thread other(reader, pages.page_begin(1) - 1, false);
    reader(pages.page_begin(0), true);
    other.join();
    EXPECT_EQ(pages.moves_in(), kRounds);
}

// No instant of a move shows a byte that is not the page's. Method: two readers on one page that is evicted 300 times.
TEST(AddressSpaceThreads, MovingShowsNoStaleByte) {
    PageSet pages(1, kFrameBytes);
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> wrong{0};
    const auto read = [&](std::uint64_t seed) {
        std::mt19937_64 random(seed);
        while (!done) wrong += load(pages.page_begin(0) + random() % pages.page_bytes()) != std::byte{1};
    };
    std::thread first(read, 1);
    std::thread second(read, 2);
    for (int evicted = 0; evicted < 300;) {
        evicted += pages.evict(0);
        std::this_thread::yield();
    }
    done = true;
    first.join();
    second.join();
    EXPECT_EQ(wrong, 0u);
}

// No write to a page that arrives read-only goes unseen. Method: one thread writes all the time while the page comes
// and goes; a page that changed must have been reported.
TEST(AddressSpaceThreads, NoWriteGoesUnseen) {
    std::span<std::byte> bytes;
    std::atomic<bool> arrived{false};
    std::atomic<bool> dirty{false};
    ScriptedTarget target([&] {
        if (!arrived.exchange(false)) return;
        dirty = true;
        space().protect(bytes, Protection::read_write);
    });
    const Range slot(kSectorBytes);
    const Range segment(kSectorBytes, &target);
    bytes = segment.bytes();
    space().commit(slot.bytes());
    std::atomic<bool> done{false};
    std::thread writer([&] {
        for (std::uint8_t value = 1; !done; ++value)
            std::atomic_ref(*segment.begin()).store(static_cast<std::byte>(value));
    });
    int unseen = 0;
    std::byte before{0};
    for (int round = 0; round < 500; ++round) {
        space().move(slot.bytes(), segment.begin(), Protection::read);
        arrived = round % 2 == 0;  // every other time the page leaves clean
        if (arrived) std::this_thread::yield();
        arrived = false;
        space().move(segment.bytes(), slot.begin(), Protection::read_write);
        const std::byte after = std::atomic_ref(*slot.begin()).load();
        unseen += after != before && !dirty.exchange(false);
        before = after;
    }
    done = true;
    space().decommit(slot.bytes());
    space().poison(segment.bytes());  // lets the writer's last store end
    writer.join();
    EXPECT_EQ(unseen, 0);
}

// Disjoint pages can move from many threads while others fault on them. Method: four movers with seeded choices, two
// readers that check every byte read.
TEST(AddressSpaceThreads, StressOfMovesAndFaults) {
    constexpr std::size_t kMovers = 4;
    PageSet pages(32, 256 * kKiB);
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> wrong{0};
    const auto read = [&](std::uint64_t seed) {
        std::mt19937_64 random(seed);
        while (!done) {
            const std::size_t page = random() % pages.page_count();
            const std::byte seen = load(pages.page_begin(page) + random() % pages.page_bytes());
            wrong += seen != static_cast<std::byte>(page + 1);
        }
    };
    const auto move = [&](std::size_t mover) {
        std::mt19937_64 random(100 + mover);
        for (int i = 0; i < 3000; ++i) {
            const std::size_t page = random() % (pages.page_count() / kMovers) * kMovers + mover;
            if (!pages.evict(page)) pages.resolve_fault(pages.page_begin(page), false);
        }
    };
    std::vector<std::thread> readers;
    for (std::uint64_t seed : {11, 12}) readers.emplace_back(read, seed);
    std::vector<std::thread> movers;
    for (std::size_t mover = 0; mover < kMovers; ++mover) movers.emplace_back(move, mover);
    for (std::thread& mover : movers) mover.join();
    done = true;
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace torch_offload::test
