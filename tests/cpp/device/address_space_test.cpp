#include "device/address_space.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "support/sanitizer_options.h"

namespace torch_offload {
namespace {

constexpr std::size_t kFrameBytes = 4 * kMiB;

AddressSpace& space() { return AddressSpace::process(); }

/// Reserved addresses of one test.
class Range {
public:
    explicit Range(std::size_t size_bytes, FaultTarget* target = nullptr)
        : bytes_(space().reserve(size_bytes, target)) {}
    ~Range() { space().release(bytes_); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

    std::span<std::byte> bytes() const { return bytes_; }
    std::byte* begin() const { return bytes_.data(); }

private:
    std::span<std::byte> bytes_;
};

/// Asks the kernel whether a byte is readable: a system call gets EFAULT where a load would fault.
bool is_readable(const std::byte* address) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) return false;
    const ssize_t written = write(ends[1], address, 1);
    const int error_number = errno;
    close(ends[0]);
    close(ends[1]);
    EXPECT_TRUE(written == 1 || error_number == EFAULT) << std::strerror(error_number);
    return written == 1;
}

std::byte load(const std::byte* address) { return *const_cast<const volatile std::byte*>(address); }
void store(std::byte* address, std::byte value) { *const_cast<volatile std::byte*>(address) = value; }

void fill(std::span<std::byte> bytes, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = random();
        std::memcpy(&bytes[i], &word, sizeof word);
    }
}

std::vector<std::byte> copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Does what a test says on a fault, and remembers the fault.
class ScriptedTarget : public FaultTarget {
public:
    explicit ScriptedTarget(std::function<void()> answer) : answer_(std::move(answer)) {}

    void resolve_fault(std::byte* address, bool is_write) noexcept override {
        address_ = address;
        was_write_ = is_write;
        ++count_;
        answer_();
    }

    std::byte* address() const { return address_; }
    bool was_write() const { return was_write_; }
    int count() const { return count_; }

private:
    std::function<void()> answer_;
    std::atomic<std::byte*> address_{nullptr};
    std::atomic<bool> was_write_{false};
    std::atomic<int> count_{0};
};

/// Touches every sector.
std::byte sum_of_sectors(std::span<const std::byte> bytes) {
    std::byte sum{0};
    for (std::size_t i = 0; i < bytes.size(); i += kSectorBytes) sum ^= load(&bytes[i]);
    return sum;
}

std::size_t resident_bytes() {
    std::size_t total_pages = 0;
    std::size_t resident_pages = 0;
    std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
    return resident_pages * kSectorBytes;
}

/// The sum of one line of smaps over the mappings that touch `bytes`.
std::size_t smaps_bytes(std::span<const std::byte> bytes, const std::string& name) {
    std::ifstream smaps("/proc/self/smaps");
    bool inside = false;
    std::size_t total = 0;
    for (std::string line; std::getline(smaps, line);) {
        void* begin = nullptr;
        void* end = nullptr;
        std::size_t kib = 0;
        if (std::sscanf(line.c_str(), "%p-%p ", &begin, &end) == 2) {
            inside = begin < bytes.data() + bytes.size() && end > bytes.data();
        } else if (inside && line.rfind(name + ":", 0) == 0 &&
                   std::sscanf(line.c_str() + name.size() + 1, "%zu", &kib) == 1) {
            total += kib * kKiB;
        }
    }
    return total;
}

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
    EXPECT_THROW(space().set_target(range.bytes().first(kSectorBytes), nullptr), LogicError);
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

// Huge pages are used where the system lets a program ask for them. Method: report their share; the system decides.
TEST(AddressSpaceCommit, ReportsHugePages) {
    const Range range(16 * kMiB);
    space().commit(range.bytes());
    fill(range.bytes(), 1);
    const std::size_t huge_bytes = smaps_bytes(range.bytes(), "AnonHugePages");
    RecordProperty("huge_page_percent", static_cast<int>(100 * huge_bytes / range.bytes().size()));
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

// A range that is several mappings moves whole or not at all. Method: two separately arrived halves, moved as one; a
// kernel before 6.17 refuses it with the bytes still there.
TEST(AddressSpaceMoveMany, SeveralMappingsMoveWholeOrNotAtAll) {
    const Range first(kMiB);
    const Range second(kMiB);
    const Range joined(2 * kMiB);
    const Range target(2 * kMiB);
    for (const Range* half : {&first, &second}) {
        space().commit(half->bytes());
        fill(half->bytes(), reinterpret_cast<std::uintptr_t>(half->begin()));
    }
    space().move(first.bytes(), joined.begin() + kMiB, Protection::read_write);
    space().move(second.bytes(), joined.begin(), Protection::read_write);
    const std::vector<std::byte> before = copy_of(joined.bytes());
    std::span<std::byte> where = target.bytes();
    try {
        space().move(joined.bytes(), target.begin(), Protection::read);
        EXPECT_FALSE(is_readable(joined.begin()));
    } catch (const LogicError&) {
        where = joined.bytes();
        EXPECT_FALSE(is_readable(target.begin()));
        space().protect(where, Protection::read);
    }
    EXPECT_EQ(copy_of(where), before);
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

/// Pages that live at a slot or at their address in a segment; a fault brings them in, `evict` takes them out. The
/// state word of each decides who moves it, as the pager's does.
class PageSet : public FaultTarget {
public:
    PageSet(std::size_t page_count, std::size_t page_bytes)
        : page_bytes_(page_bytes),
          states_(page_count),
          slots_(page_count * page_bytes),
          segment_(page_count * page_bytes, this) {
        space().commit(slots_.bytes());
        for (std::size_t page = 0; page < page_count; ++page) {
            const auto pattern = static_cast<std::byte>(page + 1);
            std::ranges::fill(slots_.bytes().subspan(page * page_bytes, page_bytes), pattern);
        }
    }

    void resolve_fault(std::byte* address, bool) noexcept override {
        const std::size_t page = static_cast<std::size_t>(address - segment_.begin()) / page_bytes_;
        if (!transit(page, State::at_slot, State::at_segment)) sched_yield();
    }

    bool evict(std::size_t page) noexcept { return transit(page, State::at_segment, State::at_slot); }

    std::size_t page_count() const { return states_.size(); }
    std::size_t page_bytes() const { return page_bytes_; }
    std::byte* page_begin(std::size_t page) const { return segment_.begin() + page * page_bytes_; }
    int arrivals() const { return arrivals_; }

private:
    enum class State { at_slot, moving, at_segment };

    /// True if this thread moved the page. If another one is moving it the access just comes again.
    bool transit(std::size_t page, State from, State to) noexcept {
        State expected = from;
        if (!states_[page].compare_exchange_strong(expected, State::moving)) return false;
        const std::span<std::byte> slot = slots_.bytes().subspan(page * page_bytes_, page_bytes_);
        const std::span<std::byte> address = segment_.bytes().subspan(page * page_bytes_, page_bytes_);
        if (to == State::at_segment) {
            space().move(slot, address.data(), Protection::read);
            ++arrivals_;
        } else {
            space().move(address, slot.data(), Protection::read_write);
        }
        states_[page] = to;
        return true;
    }

    std::size_t page_bytes_;
    std::vector<std::atomic<State>> states_;
    Range slots_;
    Range segment_;
    std::atomic<int> arrivals_{0};
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
    EXPECT_EQ(pages.arrivals(), kRounds);
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

/// A page outside the arena that nobody may read.
std::byte* foreign_page() {
    void* page = mmap(nullptr, kSectorBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return static_cast<std::byte*>(page);
}

void say(const char* text) { [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text)); }

void install(void (*handler)(int, siginfo_t*, void*), int flags) {
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | flags;
    sigaction(SIGSEGV, &action, nullptr);
}

struct sigaction displaced_action;

/// Like faulthandler: says its word, puts back what it displaced and raises again.
void raise_again(int signal, siginfo_t*, void*) {
    say("displacer;");
    sigaction(SIGSEGV, &displaced_action, nullptr);
    raise(signal);
}

void install_displacer(int flags) {
    sigaction(SIGSEGV, nullptr, &displaced_action);
    install(raise_again, flags);
}

using AddressSpaceSignal = testing::Test;

// A fault that is nobody's ends the process as ever. Method: children that touch foreign memory, an untargeted range,
// the padding behind a range; and one that raises the signal.
TEST(AddressSpaceSignal, ForeignFaultKills) {
    ScriptedTarget target([] { say("answered;"); });
    const Range untargeted(kSectorBytes);
    const Range targeted(kSectorBytes, &target);
    EXPECT_EXIT(load(foreign_page()), testing::KilledBySignal(SIGSEGV), "^$");
    EXPECT_EXIT(load(untargeted.begin()), testing::KilledBySignal(SIGSEGV), "^$");
    EXPECT_EXIT(load(targeted.begin() + kSectorBytes), testing::KilledBySignal(SIGSEGV), "^$");
    EXPECT_EXIT(raise(SIGSEGV), testing::KilledBySignal(SIGSEGV), "^$");
}

// A handler that displaced ours is noticed, chained and gets what is not ours; ours is back. Method: in a child.
TEST(AddressSpaceSignal, DisplacerIsChained) {
    const auto child = [] {
        install(
            [](int, siginfo_t* info, void*) {
                say(info->si_code == SEGV_ACCERR ? "displacer got a protection fault;"
                                                 : "displacer got something else;");
                _exit(7);
            },
            0);
        if (!space().ensure_handler_installed()) say("not noticed;");
        if (space().ensure_handler_installed()) say("not back;");
        load(foreign_page());
    };
    EXPECT_FALSE(space().ensure_handler_installed());
    EXPECT_EXIT(child(), testing::ExitedWithCode(7), "^displacer got a protection fault;$");
}

// A plain sa_handler is called too, and one with SA_RESETHAND once. Method: a handler that returns; the second fault
// takes the default action.
TEST(AddressSpaceSignal, OneShotHandlerIsCalledOnce) {
    const auto child = [] {
        struct sigaction action = {};
        action.sa_handler = [](int) { say("once;"); };
        action.sa_flags = static_cast<int>(SA_RESETHAND);
        sigaction(SIGSEGV, &action, nullptr);
        space().ensure_handler_installed();
        load(foreign_page());
    };
    EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^once;$");
}

// SIG_IGN ignores a sent signal and nothing else, as the kernel does. Method: raise, then a fault, in a child.
TEST(AddressSpaceSignal, IgnoredSignalStillKillsOnFault) {
    const auto child = [] {
        signal(SIGSEGV, SIG_IGN);
        space().ensure_handler_installed();
        raise(SIGSEGV);
        say("ignored;");
        load(foreign_page());
    };
    EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^ignored;$");
}

// A displacer that raises again to reach what it displaced does not loop through us. Method: with and without
// SA_NODEFER, as faulthandler and as others do it.
TEST(AddressSpaceSignal, DisplacerThatRaisesAgainEnds) {
    for (const int flags : {SA_NODEFER, 0}) {
        const auto child = [flags] {
            install_displacer(flags);
            space().ensure_handler_installed();
            load(foreign_page());
        };
        EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^displacer;$");
    }
}

// A previous handler that does nothing cannot hang the process. Method: one that returns, as a disabled faulthandler.
TEST(AddressSpaceSignal, HandlerWithoutEffectEndsInTheDefault) {
    const auto child = [] {
        install([](int, siginfo_t*, void*) {}, SA_NODEFER);
        space().ensure_handler_installed();
        load(foreign_page());
    };
    EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^$");
}

// A forked child does not have hidden memory and is told so. Method: touch it in a child, before and after a move.
TEST(AddressSpaceFork, HiddenMemoryIsAbsentAndExplained) {
    ScriptedTarget target([] {});
    const Range slot(kFrameBytes, &target);
    const Range segment(kFrameBytes, &target);
    space().commit(slot.bytes());
    space().hide_from_fork(slot.bytes(), true);
    fill(slot.bytes(), 1);
    EXPECT_EXIT(load(slot.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor.*spawn");
    space().move(slot.bytes(), segment.begin(), Protection::read_write);
    EXPECT_EXIT(load(segment.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor");
    EXPECT_EXIT(load(slot.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor");
}

// Being hidden is a property of the memory, not of the address. Method: shown memory moves onto hidden addresses and is
// there in a child; hidden memory moves onto shown addresses and is not.
TEST(AddressSpaceFork, HiddenTravelsWithTheMemory) {
    ScriptedTarget target([] {});
    const Range shown(kFrameBytes, &target);
    const Range hidden(kFrameBytes, &target);
    const Range elsewhere(kFrameBytes, &target);
    space().commit(shown.bytes());
    space().commit(hidden.bytes());
    space().hide_from_fork(hidden.bytes(), true);
    store(shown.begin(), std::byte{8});
    space().move(hidden.bytes(), elsewhere.begin(), Protection::read);
    space().move(shown.bytes(), hidden.begin(), Protection::read);
    EXPECT_EXIT(_exit(static_cast<int>(load(hidden.begin()))), testing::ExitedWithCode(8), "^$");
    space().move(elsewhere.bytes(), shown.begin(), Protection::read);
    EXPECT_EXIT(load(shown.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor");
}

// Memory that is not hidden means in a child what it always meant. Method: shown, hidden and shown again; committed
// anew after being hidden.
TEST(AddressSpaceFork, ShownMemoryIsTheChildsCopy) {
    ScriptedTarget target([] {});
    const Range range(kFrameBytes, &target);
    space().commit(range.bytes());
    store(range.begin(), std::byte{9});
    const auto child = [&] { _exit(static_cast<int>(load(range.begin()))); };
    EXPECT_EXIT(child(), testing::ExitedWithCode(9), "^$");
    space().hide_from_fork(range.bytes(), true);
    space().hide_from_fork(range.bytes(), false);
    EXPECT_EXIT(child(), testing::ExitedWithCode(9), "^$");
    space().hide_from_fork(range.bytes(), true);
    space().decommit(range.bytes());
    space().commit(range.bytes());
    EXPECT_EXIT(child(), testing::ExitedWithCode(0), "^$");
}

// A child can reserve and commit ranges of its own whatever the parent's threads were doing. Method: fork while two
// threads reserve and release without end.
TEST(AddressSpaceFork, ChildIsNotLeftWithALockedArena) {
    std::atomic<bool> done{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            while (!done) const Range range(kSectorBytes);
        });
    }
    for (int i = 0; i < 20; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            const Range range(kFrameBytes);
            space().commit(range.bytes());
            store(range.begin(), std::byte{5});
            _exit(static_cast<int>(load(range.begin())));
        }
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 5);
    }
    done = true;
    for (std::thread& thread : threads) thread.join();
}

// Too many mappings is a typed error that names the limit, and the move that met it changed nothing. Method: in a
// child, commit every other sector until it fails, then move.
TEST(AddressSpaceLimits, TooManyMappingsNameTheRemedy) {
    std::size_t limit = 0;
    std::ifstream("/proc/sys/vm/max_map_count") >> limit;
    if (kSanitized) GTEST_SKIP() << "a sanitizer needs mappings of its own";
    if (limit > 200000) GTEST_SKIP() << "vm.max_map_count is " << limit << ": it would take too long to reach";
    const auto child = [limit] {
        const Range source(kSectorBytes);
        const Range target(kSectorBytes);
        const Range many(2 * limit * kSectorBytes);
        space().commit(source.bytes());
        store(source.begin(), std::byte{3});
        std::string message;
        try {
            for (std::size_t i = 0; i < 2 * limit; i += 2)
                space().commit(many.bytes().subspan(i * kSectorBytes, kSectorBytes));
        } catch (const OutOfTierMemory& error) {
            message = error.what();
        }
        if (message.find("sysctl -w vm.max_map_count=") == std::string::npos) _exit(1);
        try {
            space().move(source.bytes(), target.begin(), Protection::read);
            _exit(2);
        } catch (const OutOfTierMemory&) {
            space().protect(source.bytes(), Protection::read);
        }
        _exit(is_readable(target.begin()) ? 3 : static_cast<int>(load(source.begin())) + 40);
    };
    EXPECT_EXIT(child(), testing::ExitedWithCode(43), "^$");
}

}  // namespace
}  // namespace torch_offload
