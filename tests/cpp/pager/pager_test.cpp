#include "pager/pager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "storage/thread_engine.h"
#include "support/gated_engine.h"
#include "support/pager_fixture.h"
#include "support/sanitizer_options.h"
#include "support/scratch_directory.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

// A new segment is zeros and owns no memory until it is pinned. Method: create, look at the usage, pin, read.
TEST(Pager, NewSegmentIsZerosWithoutMemory) {
    Pager pager(options_with(8));
    const auto segment = pager.create_segment(2 * kPageBytes + 100, 4, SegmentKind::state);
    EXPECT_EQ(pager.statistics().memory.used_bytes(), 0u);
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_TRUE(std::ranges::all_of(segment->range(), [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(total(pager.statistics().read_bytes), 0u);
}

// Bytes survive leaving memory, and the budget is never exceeded. Method: eight segments through room for three.
TEST(Pager, BytesComeBackAndBudgetHolds) {
    Pager pager(options_with(12));
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 8; ++i) segments.push_back(filled_segment(pager, 4, i));
    for (int round = 0; round < 3; ++round) {
        for (std::uint32_t i = 0; i < 8; ++i) {
            const PinGuard guard = pin(pager, segments[i], Access::read);
            ASSERT_TRUE(holds(*segments[i], i));
        }
    }
    const PagerStatistics statistics = pager.statistics();
    EXPECT_LE(statistics.memory.peak_bytes, 12 * kPageBytes);
    EXPECT_GT(total(statistics.read_bytes), 0u);
    EXPECT_GT(total(statistics.written_bytes), 0u);
}

// A clean page is dropped without a write. Method: write once, evict twice with only a read between.
TEST(Pager, CleanPageIsDroppedWithoutWrite) {
    Pager pager(options_with(8));
    const auto segment = filled_segment(pager, 2, 7);
    EXPECT_EQ(pager.evict(segment), 0u);
    const std::uint64_t written = total(pager.statistics().written_bytes);
    {
        const PinGuard guard = pin(pager, segment, Access::read);
    }
    EXPECT_EQ(pager.evict(segment), 0u);
    EXPECT_EQ(total(pager.statistics().written_bytes), written);
    EXPECT_FALSE(pager.is_resident(*segment));
}

// A full overwrite reads nothing. Method: evict, pin for overwrite, count reads.
TEST(Pager, OverwriteReadsNothing) {
    Pager pager(options_with(8));
    const auto segment = filled_segment(pager, 2, 7);
    pager.evict(segment);
    {
        const PinGuard guard = pin(pager, segment, Access::overwrite);
        fill(*segment, 8);
    }
    EXPECT_EQ(total(pager.statistics().read_bytes), 0u);
    pager.evict(segment);
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 8));
}

// What cannot fit is refused before anything is touched. Method: pin more than the budget, look at counters, go on.
TEST(Pager, RefusesWhatCannotFitBeforeTouchingAnything) {
    Pager pager(options_with(4));
    const auto small = filled_segment(pager, 2, 1);
    const auto large = pager.create_segment(5 * kPageBytes, 4, SegmentKind::parameter);
    const std::uint64_t evictions = pager.statistics().evictions;
    EXPECT_THROW(static_cast<void>(pin(pager, large, Access::read)), OutOfTierMemory);
    EXPECT_EQ(pager.statistics().evictions, evictions);
    const PinGuard guard = pin(pager, small, Access::read);
    EXPECT_TRUE(holds(*small, 1));
}

// Pinned pages stay, so that memory for others runs out with a typed error. Method: pin half, ask for too much.
TEST(Pager, PinnedPagesAreNotEvicted) {
    Pager pager(options_with(5));
    const auto held = filled_segment(pager, 2, 1);
    const PinGuard guard = pin(pager, held, Access::read);
    EXPECT_THROW(static_cast<void>(pager.allocate_range(4 * kPageBytes)), OutOfTierMemory);
    const auto range = pager.allocate_range(2 * kPageBytes);
    pager.free_range(range);
    EXPECT_TRUE(holds(*held, 1));
}

// Temporaries push pages out and are adopted without a copy. Method: allocate, fill, adopt, evict, read back.
TEST(Pager, AdoptedRangeKeepsAddressAndBytes) {
    Pager pager(options_with(8));
    const auto bystander = filled_segment(pager, 6, 1);
    const auto range = pager.allocate_range(4 * kPageBytes);
    const std::byte* address = range.data();
    auto gradient = pager.adopt_range(range, 4 * kPageBytes, 4, {.kind = SegmentKind::gradient});
    fill(*gradient, 9);
    EXPECT_EQ(gradient->range().data(), address);
    pager.evict(gradient);
    {
        const PinGuard guard = pin(pager, bystander, Access::read);
    }
    const PinGuard guard = pin(pager, gradient, Access::read);
    EXPECT_TRUE(holds(*gradient, 9));
    EXPECT_LE(pager.statistics().memory.peak_bytes, 8 * kPageBytes);
}

// An access behind everybody's back pages in, and a raw write is not lost. Method: evict, read and write by pointer.
TEST(Pager, RawAccessFaultsIn) {
    Pager pager(options_with(8));
    const auto segment = filled_segment(pager, 3, 5);
    pager.evict(segment);
    EXPECT_TRUE(holds(*segment, 5));
    EXPECT_GT(pager.statistics().faults, 0u);
    fill(*segment, 6);
    pager.evict(segment);
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 6));
}

// Deferred work runs before a page is seen, by pin or by fault, exactly once. Method: an update that adds one.
TEST(Pager, PendingPageIsResolvedBeforeItIsSeen) {
    Pager pager(options_with(8));
    const auto segment = filled_segment(pager, 2, 3);
    pager.evict(segment);
    std::atomic<int> applied{0};
    pager.set_pending_work(
        [&](Segment& pending, std::size_t index, bool may_wait) {
            const std::shared_ptr<Segment> members[] = {segment};
            EXPECT_EQ(&pending, segment.get());
            UpdateLatch latch = pager.latch_for_update(members, index, may_wait);
            if (!latch) return false;
            auto* word = reinterpret_cast<std::uint32_t*>(latch.bytes(0).data());
            *word += 1;
            latch.finish();
            ++applied;
            return true;
        },
        [&](Segment&) { return std::vector<std::shared_ptr<Segment>>{segment}; });
    ASSERT_TRUE(pager.set_pending(*segment, 0));
    ASSERT_TRUE(pager.set_pending(*segment, 1));
    const auto* words = reinterpret_cast<const std::uint32_t*>(segment->range().data());
    EXPECT_EQ(words[0], word_of(3, 0) + 1);  // by fault
    {
        const PinGuard guard = pin(pager, segment, Access::read);
        EXPECT_EQ(words[kPageElements], word_of(3, kPageElements) + 1);
    }
    EXPECT_EQ(applied, 2);
    pager.clear_pending_work();
}

// Nothing is lost or torn under threads that pin, write, allocate and touch raw memory. Method: seeded random work.
TEST(Pager, RandomWorkloadKeepsEveryByte) {
    Pager pager(options_with(24));
    constexpr std::uint32_t kSegments = 12;
    std::vector<std::shared_ptr<Segment>> segments;
    std::vector<std::uint32_t> holding(kSegments);
    for (std::uint32_t i = 0; i < kSegments; ++i) {
        holding[i] = i;
        segments.push_back(segment_with_role(pager, 1 + i % 5, i));
    }
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (std::uint32_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
            std::mt19937_64 random(base_seed() + t);
            for (int step = 0; step < 400; ++step) {
                const std::uint32_t i = (random() % (kSegments / 3)) * 3 + t;  // each thread has its own segments
                pager.touch(segments[i]);
                switch (random() % 5) {
                    case 0: {
                        const PinGuard guard = pin(pager, segments[i], Access::write);
                        if (!holds(*segments[i], holding[i])) ++wrong;
                        fill(*segments[i], ++holding[i]);
                        break;
                    }
                    case 1: {
                        const auto range = pager.allocate_range((1 + random() % 3) * kPageBytes);
                        std::memset(range.data(), 0xAB, range.size());
                        pager.free_range(range);
                        break;
                    }
                    case 2:
                        pager.evict(segments[i]);
                        break;
                    case 3:
                        if (!holds(*segments[i], holding[i])) ++wrong;  // raw
                        break;
                    default: {
                        const PinGuard guard = pin(pager, segments[i], Access::read);
                        if (!holds(*segments[i], holding[i])) ++wrong;
                    }
                }
                if (t == 0 && step % 50 == 0) pager.end_step();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_LE(pager.statistics().memory.peak_bytes, 24 * kPageBytes);
}

// A page that nobody will read any more leaves without being written. Method: an update that discards one of two pages,
// then evict both.
TEST(Pager, DiscardedPageIsNotWritten) {
    Pager pager(options_with(8));
    const std::vector<std::shared_ptr<Segment>> segments{filled_segment(pager, 1, 1), filled_segment(pager, 1, 2)};
    {
        UpdateLatch latch = pager.latch_for_update(segments, 0, true);
        ASSERT_TRUE(latch);
        latch.finish();
        latch.discard(1);
    }
    for (const auto& segment : segments) EXPECT_EQ(pager.evict(segment), 0u);
    EXPECT_EQ(total(pager.statistics().written_bytes), kPageBytes);
    EXPECT_EQ(pager.statistics().clean_drops, 1u);
}

/// Threads that count what they are given to write, by file.
class CountingEngine final : public IoEngine {
public:
    std::size_t submit(std::span<IoRequest* const> requests) override {
        const std::size_t taken = engine_.submit(requests);
        for (const IoRequest* request : requests.first(taken)) {
            if (request->direction == IoDirection::write) ++writes[request->file_descriptor];
        }
        return taken;
    }
    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override {
        return engine_.reap(finished, timeout);
    }
    void wake() noexcept override { engine_.wake(); }
    BufferIndex register_buffer(std::span<std::byte>) override { return kUnregistered; }
    void unregister_buffer(BufferIndex) override {}
    bool quiesce() noexcept override { return engine_.quiesce(); }
    std::size_t capacity() const noexcept override { return engine_.capacity(); }
    std::string name() const override { return "counting"; }

    std::map<int, std::size_t> writes;

private:
    ThreadEngine engine_{8};
};

// Pages spread over directories come back from the one that each went to. Method: two directories, a budget of four
// pages, sixteen pages written and read; the engine counts the files that it is given.
TEST(Pager, StripesOverDirectories) {
    const ScratchDirectory first, second;
    PagerOptions options = options_with(4);
    options.directories = {first.path(), second.path()};
    auto made = std::make_unique<CountingEngine>();
    const CountingEngine& engine = *made;
    Pager pager(options, std::move(made));
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t seed = 0; seed < 16; ++seed) segments.push_back(filled_segment(pager, 1, seed));
    for (std::uint32_t seed = 0; seed < 16; ++seed) {
        const PinGuard guard = pin(pager, segments[seed], Access::read);
        EXPECT_TRUE(holds(*segments[seed], seed));
    }
    pager.flush();
    ASSERT_EQ(engine.writes.size(), 2u);
    for (const auto& [file, count] : engine.writes) EXPECT_GE(count, 6u) << file;
    EXPECT_GE(total(pager.statistics().read_bytes), 12 * kPageBytes);
}

// A kernel that reaches several tensors by faults alone brings each page a few times at most. Method: four tensors of
// which five eighths fit, walked element by element without pins, twice, by two threads at once; every word is looked
// at.
TEST(PagerFaultNet, KernelWithoutPinsMakesProgress) {
    constexpr std::size_t kPages = 8;
    Pager pager(options_with(20));
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 4; ++i) segments.push_back(filled_segment(pager, kPages, i));
    for (const auto& segment : segments) ASSERT_EQ(pager.evict(segment), 0u);
    const std::size_t words = segments[0]->size_bytes() / 4;
    const auto walk = [&](std::size_t begin, std::size_t end) {
        std::array<std::uint32_t*, 4> at{};
        for (std::size_t k = 0; k < 4; ++k) at[k] = reinterpret_cast<std::uint32_t*>(segments[k]->range().data());
        for (std::size_t i = begin; i < end; ++i) {
            for (std::size_t k = 0; k < 3; ++k) at[3][i] += at[k][i];  // each element of all four, one after the other
        }
    };
    for (int round = 0; round < 2; ++round) {
        std::thread other(walk, 0, words / 2);
        walk(words / 2, words);
        other.join();
    }
    EXPECT_LE(pager.statistics().faults, 8 * 4 * kPages);
    const PinGuard guard = pin(pager, segments[3], Access::read);
    const auto* sums = reinterpret_cast<const std::uint32_t*>(segments[3]->range().data());
    for (std::size_t i = 0; i < words; ++i) {
        ASSERT_EQ(sums[i], word_of(3, i) + 2 * (word_of(0, i) + word_of(1, i) + word_of(2, i))) << i;
    }
}

// Where raw accesses go forwards the next page is read beside the one that is waited for; elsewhere it is not. Method:
// a disk that finishes nothing until the reads that are expected are under way.
TEST(PagerFaultNet, PagesBehindAFaultAreReadAhead) {
    auto made = std::make_unique<GatedEngine>();
    GatedEngine& disk = *made;
    Pager pager(options_with(12), std::move(made));
    const auto segment = filled_segment(pager, 4, 1);
    const auto reads_for = [&](std::size_t index, std::size_t expected) {
        EXPECT_EQ(pager.evict(segment), 0u);
        disk.shut();
        std::thread reader([&] { EXPECT_NE(segment->range()[index * kPageBytes], std::byte{0xFF}); });
        while (disk.order().size() < expected) std::this_thread::yield();
        disk.open();
        reader.join();
        return disk.order();
    };
    EXPECT_EQ(reads_for(0, 2), "rr");
    EXPECT_EQ(reads_for(2, 1), "r");
    EXPECT_EQ(pager.statistics().prefetches, 1u);
    EXPECT_TRUE(holds(*segment, 1));
}

// What faults have brought gives way to who needs the memory. Method: raw reads fill half of the budget, then a pin
// takes nearly all of it, and deferred work may be put on what was read.
TEST(PagerFaultNet, PagesThatFaultsBroughtGiveWay) {
    Pager pager(options_with(16));
    const auto read = filled_segment(pager, 8, 1);
    ASSERT_EQ(pager.evict(read), 0u);
    EXPECT_TRUE(holds(*read, 1));
    EXPECT_GE(pager.statistics().faults, 8u);
    {
        const auto large = filled_segment(pager, 14, 2);
        EXPECT_TRUE(holds(*large, 2));
    }
    EXPECT_TRUE(holds(*read, 1));
    EXPECT_TRUE(pager.set_pending(*read, 0));
    EXPECT_EQ(pager.evict(read), 0u);
}

// Who was waiting for a page goes on as soon as it is mapped, before the thread that brought it has let it go. Method:
// a page is evicted at once after each of many accesses.
TEST(PagerFaultNet, PageIsEvictedRightAfterItsFault) {
    Pager pager(options_with(16));
    const auto segment = filled_segment(pager, 1, 1);
    for (int round = 0; round < 500; ++round) {
        ASSERT_EQ(pager.evict(segment), 0u) << round;
        ASSERT_NE(segment->range()[0], std::byte{0xFF});
    }
    EXPECT_GE(pager.statistics().faults, 500u);
}

/// What the kernel says of this process's threads whose name begins with `prefix`: name and blocked signals, in hex.
std::map<std::string, std::uint64_t> threads_named(const std::string& prefix) {
    std::map<std::string, std::uint64_t> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream status(task.path() / "status");
        std::string name;
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("Name:\t")) name = line.substr(6);
            if (line.starts_with("SigBlk:\t") && name.starts_with(prefix)) {
                found[name] = std::stoull(line.substr(8), nullptr, 16);
            }
        }
    }
    return found;
}

// Threads of the engine have names, and leave signals to the program. Method: what the kernel says of them.
TEST(PagerThreads, HaveNamesAndTakeNoSignals) {
    Pager pager(options_with(8, IoEngineKind::threads));
    const std::uint64_t interrupt = std::uint64_t{1} << (SIGINT - 1);
    const std::uint64_t fault = std::uint64_t{1} << (SIGSEGV - 1);
    for (const char* name : {"to-ssd", "to-service", "to-io"}) {
        ASSERT_TRUE(comes_true([&] { return threads_named("to-").contains(name); })) << name;
        const std::uint64_t blocked = threads_named("to-").at(name);
        EXPECT_TRUE(blocked & interrupt) << name;
        EXPECT_FALSE(blocked & fault) << name;
    }
}

}  // namespace
}  // namespace torch_offload::test
