#include "pager/pager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

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
    auto gradient = pager.adopt_range(range, 4 * kPageBytes, 4, SegmentKind::gradient);
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
        segments.push_back(filled_segment(pager, 1 + i % 5, i));
        segments.back()->trace_id = pager.new_trace_id();
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

// Pages spread over directories come back from the one that each went to. Method: two directories, a budget of four
// pages, sixteen pages written and read.
TEST(Pager, StripesOverDirectories) {
    const ScratchDirectory first, second;
    PagerOptions options = options_with(4);
    options.directories = {first.path(), second.path()};
    Pager pager(options);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t seed = 0; seed < 16; ++seed) segments.push_back(filled_segment(pager, 1, seed));
    for (std::uint32_t seed = 0; seed < 16; ++seed) {
        const PinGuard guard = pin(pager, segments[seed], Access::read);
        EXPECT_TRUE(holds(*segments[seed], seed));
    }
    std::array<std::size_t, 2> pages{};
    for (const auto& segment : segments) {
        if (const auto& extent = segment->page(0).extent) ++pages.at(extent->file);
    }
    EXPECT_GE(pages[0], 6u);
    EXPECT_GE(pages[1], 6u);
    EXPECT_GE(total(pager.statistics().read_bytes), 12 * kPageBytes);
}

}  // namespace
}  // namespace torch_offload::test
