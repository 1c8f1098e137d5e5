#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <random>
#include <thread>

#include "storage/fallback_engine.h"
#include "storage/thread_engine.h"
#include "support/breaking_engine.h"
#include "support/gated_engine.h"
#include "support/pager_fixture.h"
#include "support/seeds.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

struct FaultyPager {
    explicit FaultyPager(std::uint64_t seed = 1, const SimChances& chances = {}, std::size_t budget_pages = 12)
        : engine(new SimEngine(8, seed, chances)),
          pager(options_with(budget_pages), std::unique_ptr<IoEngine>(engine)) {}

    /// Fails the next `count` transfers, each in both of the attempts that are made at once.
    void fail_transfers(int count) {
        for (int i = 0; i < 2 * count; ++i) engine->script(SimFault::io_error_once);
    }

    SimEngine* engine;  // the pager's
    Pager pager;
};

// A read that keeps failing is a typed error at every access; other pages go on. Method: a place that is bad for good.
TEST(PagerFaults, FailedReadIsRaisedAtEveryAccess) {
    FaultyPager f;
    const auto lost = filled_segment(f.pager, 1, 1);
    const auto sound = filled_segment(f.pager, 1, 2);
    f.pager.evict(lost);
    f.pager.evict(sound);
    f.engine->script(SimFault::io_error_forever);
    for (int access = 0; access < 2; ++access) {
        EXPECT_THROW(static_cast<void>(pin(f.pager, lost, Access::read)), TierIoError);
    }
    const PinGuard guard = pin(f.pager, sound, Access::read);
    EXPECT_TRUE(holds(*sound, 2));
}

// An error that passes while a read waits is not seen by the program, and is counted. Method: EIO for one transfer.
TEST(PagerFaults, PassingReadErrorIsRiddenOut) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    f.pager.evict(segment);
    f.fail_transfers(1);
    const PinGuard guard = pin(f.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
    EXPECT_EQ(f.pager.statistics().store.retried_reads, 1u);
}

// An error that lasts longer than reads are tried is raised, and the next access has the bytes. Method: EIO for both
// transfers of an access, for errors of several kinds.
TEST(PagerFaults, ReadThatFailedIsMadeAgainByTheNextAccess) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 2, 1);
    for (const int error : {EIO, ENOMEM, ETIMEDOUT, ENODEV, ESTALE, EINVAL}) {
        f.pager.evict(segment);
        f.engine->refuse(IoDirection::read, error);
        EXPECT_THROW(static_cast<void>(pin(f.pager, segment, Access::read)), TierIoError) << error;
        f.engine->refuse(IoDirection::read, 0);
        const PinGuard guard = pin(f.pager, segment, Access::read);
        EXPECT_TRUE(holds(*segment, 1));
    }
}

// A place that cannot be written is left for another one and not used again. Method: a bad sector under a write.
TEST(PagerFaults, BadPlaceIsLeft) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    f.engine->script(SimFault::io_error_forever);
    EXPECT_EQ(f.pager.evict(segment), 0u);
    const StoreStatistics store = f.pager.statistics().store;
    EXPECT_EQ(store.retried_writes, 1u);
    EXPECT_EQ(store.quarantined_bytes, kPageBytes);
    EXPECT_EQ(store.stored_bytes, 2 * kPageBytes) << "the page and the bad place";
    const PinGuard guard = pin(f.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// A page is written to a new place, and the old one is free once that has succeeded. Method: write a page often.
TEST(PagerFaults, RewrittenPageTakesOnePlace) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    for (std::uint32_t seed = 2; seed < 12; ++seed) {
        ASSERT_EQ(f.pager.evict(segment), 0u);
        EXPECT_EQ(f.pager.statistics().store.stored_bytes, kPageBytes);
        const PinGuard guard = pin(f.pager, segment, Access::write);
        ASSERT_TRUE(holds(*segment, seed - 1));
        fill(*segment, seed);
    }
}

// While nothing can be written, what is in memory is used, clean pages make room, and memory that only a write would
// free is a typed error. Once there is room, everything goes on. Method: writes refused for a while, of both kinds.
TEST(PagerFaults, NothingStopsThatNeedsNoWrite) {
    for (const int error : {ENOSPC, EIO}) {
        FaultyPager f(1, {}, 8);
        const auto clean = filled_segment(f.pager, 2, 1);
        ASSERT_EQ(f.pager.evict(clean), 0u);
        const auto stored = filled_segment(f.pager, 2, 2);
        ASSERT_EQ(f.pager.evict(stored), 0u);
        const auto dirty = filled_segment(f.pager, 5, 3);
        f.engine->refuse(IoDirection::write, error);
        EXPECT_THROW(f.pager.evict(dirty), TierIoError);
        for (int round = 0; round < 20; ++round) {
            const auto& segment = round % 2 == 0 ? clean : stored;  // one makes room for the other
            const PinGuard guards[] = {pin(f.pager, segment, Access::read), pin(f.pager, dirty, Access::write)};
            ASSERT_TRUE(holds(*segment, round % 2 == 0 ? 1 : 2) && holds(*dirty, 3)) << round;
        }
        const auto more = f.pager.create_segment(6 * kPageBytes, 4, SegmentKind::parameter);
        EXPECT_THROW(static_cast<void>(pin(f.pager, more, Access::overwrite)), TierIoError);
        EXPECT_NO_THROW(f.pager.end_step()) << "that was said";
        f.engine->refuse(IoDirection::write, 0);
        EXPECT_EQ(f.pager.evict(dirty), 0u);
        f.pager.end_step();
        const PinGuard guard = pin(f.pager, dirty, Access::read);
        EXPECT_TRUE(holds(*dirty, 3));
    }
}

// --- Pins that overwrite --------------------------------------------------------------------------------------------

// A pin that fails leaves what it would have overwritten as it was. Method: memory that held other bytes, a target in
// each state (stored, never written, in memory), and a source that cannot be read.
TEST(PagerFaults, FailedPinOverwritesNothing) {
    FaultyPager f(1, {}, 16);
    const auto source = filled_segment(f.pager, 1, 1);
    const auto stored = filled_segment(f.pager, 2, 2);
    const auto resident = filled_segment(f.pager, 2, 3);
    const auto fresh = f.pager.create_segment(2 * kPageBytes, 4, SegmentKind::parameter);
    {
        const auto other = filled_segment(f.pager, 6, 99);  // what free memory holds later
    }
    f.pager.evict(source);
    f.pager.evict(stored);
    f.engine->refuse(IoDirection::read, EIO);
    const PinRequest requests[] = {
        {stored, Access::overwrite}, {resident, Access::overwrite}, {fresh, Access::overwrite}, {source, Access::read}};
    EXPECT_THROW(static_cast<void>(f.pager.pin(requests)), TierIoError);
    f.engine->refuse(IoDirection::read, 0);
    for (int round = 0; round < 2; ++round) {
        const PinGuard guards[] = {pin(f.pager, stored, Access::read), pin(f.pager, resident, Access::read),
                                   pin(f.pager, fresh, Access::read), pin(f.pager, source, Access::read)};
        EXPECT_TRUE(holds(*stored, 2));
        EXPECT_TRUE(holds(*resident, 3));
        EXPECT_TRUE(holds(*source, 1));
        EXPECT_TRUE(std::ranges::all_of(fresh->range(), [](std::byte byte) { return byte == std::byte{0}; }));
    }
    EXPECT_EQ(f.pager.evict(stored), 0u);
    const PinGuard guard = pin(f.pager, stored, Access::read);
    EXPECT_TRUE(holds(*stored, 2)) << "and nothing else was written";
}

// The same where memory ends in the middle of a target. Method: dirty pages that cannot be written take the rest.
TEST(PagerFaults, PinWithoutMemoryOverwritesNothing) {
    FaultyPager f(1, {}, 8);
    const auto target = filled_segment(f.pager, 4, 1);
    ASSERT_EQ(f.pager.evict(target), 0u);
    const auto dirty = filled_segment(f.pager, 5, 2);
    f.engine->refuse(IoDirection::write, ENOSPC);
    EXPECT_THROW(static_cast<void>(pin(f.pager, target, Access::overwrite)), TierIoError);
    f.engine->refuse(IoDirection::write, 0);
    ASSERT_EQ(f.pager.evict(dirty), 0u);
    const PinGuard guard = pin(f.pager, target, Access::read);
    EXPECT_TRUE(holds(*target, 1));
}

// Nobody gets a page that a pin of another thread will overwrite before that pin has all it needs. Method: a disk that
// finishes nothing keeps the pin waiting for its source, while another thread asks for its target.
TEST(PagerFaults, PageThatWillBeOverwrittenIsNobodyElses) {
    auto made = std::make_unique<GatedEngine>();
    GatedEngine& disk = *made;
    Pager pager(options_with(12), std::move(made));
    const auto source = filled_segment(pager, 1, 1);
    const auto target = filled_segment(pager, 1, 2);
    ASSERT_EQ(pager.evict(source) + pager.evict(target), 0u);
    disk.shut();
    std::thread overwriter([&] {
        const PinRequest requests[] = {{target, Access::overwrite}, {source, Access::read}};
        const PinGuard guard = pager.pin(requests);
        fill(*target, 3);
    });
    ASSERT_TRUE(comes_true([&] { return target->page(0).load().has(PageWord::kUndefined); }));
    std::atomic<bool> has_it{false};
    std::thread reader([&] {
        const PinGuard guard = pin(pager, target, Access::read);
        has_it = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in which one that does not wait would have it
    EXPECT_FALSE(has_it);
    disk.open();
    overwriter.join();
    reader.join();
    const PinGuard guard = pin(pager, target, Access::read);
    EXPECT_TRUE(holds(*target, 3));
}

// Who uses a tensor while another thread's pin on it is being made sees it as before or overwritten, nothing between.
// Method: one thread overwrites with pins that fail half of the time, another reads.
TEST(PagerFaults, OthersSeeNoPageBeforeItsPinIsMade) {
    FaultyPager f(1, {}, 12);
    const auto source = filled_segment(f.pager, 1, 1);
    const auto target = filled_segment(f.pager, 3, 2);
    std::atomic<bool> has_ended{false};
    std::thread overwriter([&] {
        for (int round = 0; round < 100; ++round) {
            f.pager.evict(source);
            f.pager.evict(target);
            f.engine->refuse(IoDirection::read, EINVAL);
            const PinRequest requests[] = {{target, Access::overwrite}, {source, Access::read}};
            EXPECT_THROW(static_cast<void>(f.pager.pin(requests)), TierIoError);
            f.engine->refuse(IoDirection::read, 0);
        }
        has_ended = true;
    });
    std::size_t seen = 0;
    while (!has_ended) {
        try {
            const PinGuard guard = pin(f.pager, target, Access::read);
            EXPECT_TRUE(holds(*target, 2));
            ++seen;
        } catch (const TierIoError&) {  // its own read came while reads fail
        }
    }
    overwriter.join();
    const PinGuard guard = pin(f.pager, target, Access::read);
    EXPECT_TRUE(holds(*target, 2));
    EXPECT_GT(seen, 0u);
}

// Overwriting brings a lost page back. Method: a page that was torn in silence; then zeros in the frame, new bytes, and
// a pin that fails in between, which leaves it lost.
TEST(PagerFaults, OverwritingHealsALostPage) {
    FaultyPager f;
    const auto source = filled_segment(f.pager, 1, 7);
    const auto segment = filled_segment(f.pager, 1, 1);
    f.engine->script(SimFault::silent_torn_write);
    f.pager.evict(segment);
    f.pager.evict(source);
    EXPECT_THROW(static_cast<void>(pin(f.pager, segment, Access::read)), CorruptPage);
    EXPECT_THROW(static_cast<void>(pin(f.pager, segment, Access::write)), CorruptPage);
    EXPECT_EQ(f.pager.statistics().store.quarantined_bytes, kPageBytes);
    f.engine->refuse(IoDirection::read, EIO);
    const PinRequest requests[] = {{segment, Access::overwrite}, {source, Access::read}};
    EXPECT_THROW(static_cast<void>(f.pager.pin(requests)), TierIoError);
    f.engine->refuse(IoDirection::read, 0);
    EXPECT_THROW(static_cast<void>(pin(f.pager, segment, Access::read)), CorruptPage);
    {
        const PinGuard guard = pin(f.pager, segment, Access::overwrite);
        fill(*segment, 2);
    }
    for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(f.pager.evict(segment), 0u);
        const PinGuard guard = pin(f.pager, segment, Access::read);
        EXPECT_TRUE(holds(*segment, 2));
    }
}

// --- An engine that breaks ------------------------------------------------------------------------------------------

// If the I/O engine breaks under a pager, a second one carries on and no byte is lost. Method: the nth call of an
// engine over a real file throws, for many n, while pages go back and forth.
TEST(PagerFaults, BrokenEngineIsReplaced) {
    std::size_t broken = 0;
    for (int calls = 0; calls < 60; ++calls) {
        auto breaking = std::make_unique<BreakingEngine>(std::make_unique<ThreadEngine>(8), calls);
        const auto is_broken = breaking->is_broken();
        Pager pager(options_with(8), std::make_unique<FallbackEngine>(std::move(breaking)));
        std::vector<std::shared_ptr<Segment>> segments;
        for (std::uint32_t i = 0; i < 6; ++i) segments.push_back(filled_segment(pager, 2, i));
        for (std::uint32_t i = 0; i < 12; ++i) {
            const PinGuard guard = pin(pager, segments[i % 6], Access::read);
            ASSERT_TRUE(holds(*segments[i % 6], i % 6)) << "after " << calls << " calls";
        }
        broken += is_broken->load();
    }
    EXPECT_GT(broken, 20u);
}

// An engine that cannot be replaced makes typed errors, not the end of the process; what is in memory stays usable, and
// the pager can be destroyed. Method: every call of the engine throws from the nth on.
TEST(PagerFaults, EngineBrokenForGoodIsATypedError) {
    auto breaking = std::make_unique<BreakingEngine>(std::make_unique<ThreadEngine>(8), 40);
    const auto is_broken = breaking->is_broken();
    Pager pager(options_with(8), std::move(breaking));
    const auto stored = filled_segment(pager, 1, 1);
    const auto resident = filled_segment(pager, 1, 2);
    ASSERT_EQ(pager.evict(stored), 0u);
    ASSERT_TRUE(comes_true([&] {
        const PinGuard guard = pin(pager, stored, Access::write);
        fill(*stored, 1);
        return is_broken->load();
    }));
    EXPECT_THROW(pager.evict(stored), TierIoError);
    const PinGuard guard = pin(pager, resident, Access::read);
    EXPECT_TRUE(holds(*resident, 2));
}

// A full disk is a typed error and loses nothing. Method: scripted ENOSPC on a write-back, then try again.
TEST(PagerFaults, FullDiskKeepsTheBytes) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    f.engine->script(SimFault::no_space);
    EXPECT_THROW(f.pager.evict(segment), TierIoError);
    {
        const PinGuard guard = pin(f.pager, segment, Access::read);
        EXPECT_TRUE(holds(*segment, 1));
    }
    EXPECT_EQ(f.pager.evict(segment), 0u);
    const PinGuard guard = pin(f.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// A write that tears in silence is caught by the checksum, never returned. Method: tear the second write, then read.
TEST(PagerFaults, SilentTearIsCorruptPage) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    f.pager.evict(segment);
    {
        const PinGuard guard = pin(f.pager, segment, Access::write);
        fill(*segment, 2);
    }
    f.engine->script(SimFault::silent_torn_write);
    f.pager.evict(segment);
    EXPECT_THROW(static_cast<void>(pin(f.pager, segment, Access::read)), CorruptPage);
}

// A bit that flips on the way is read again, without an error. Method: scripted flip in the first read only.
TEST(PagerFaults, FlippedBitIsReadAgain) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    f.pager.evict(segment);
    f.engine->script(SimFault::silent_bit_flip);
    const PinGuard guard = pin(f.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// An access behind the dispatcher that cannot be served ends on 0xFF, and the next pin raises why; from then on
// accesses are served again. Method: EIO, read raw, before and after reads succeed.
TEST(PagerFaults, RawAccessThatFailedIsServedOnceItsErrorWasRaised) {
    FaultyPager f;
    const auto segment = filled_segment(f.pager, 1, 1);
    const auto other = filled_segment(f.pager, 1, 2);
    f.pager.evict(segment);
    f.engine->refuse(IoDirection::read, EIO);
    EXPECT_EQ(static_cast<unsigned>(segment->range()[0]), 0xFFu);
    f.engine->refuse(IoDirection::read, 0);
    EXPECT_THROW(static_cast<void>(pin(f.pager, other, Access::read)), TierIoError);
    EXPECT_TRUE(holds(*segment, 1));
    EXPECT_EQ(f.pager.evict(segment), 0u);
    const PinGuard guard = pin(f.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// The same for a page that is lost. Method: a bad place, read raw.
TEST(PagerFaults, RawAccessToALostPageIsRaisedByTheNextPin) {
    FaultyPager f;
    const auto lost = filled_segment(f.pager, 1, 1);
    const auto sound = filled_segment(f.pager, 1, 2);
    f.pager.evict(lost);
    f.engine->script(SimFault::io_error_forever);
    EXPECT_EQ(static_cast<unsigned>(lost->range()[0]), 0xFFu);
    EXPECT_THROW(static_cast<void>(pin(f.pager, sound, Access::read)), TierIoError);
    const PinGuard guard = pin(f.pager, sound, Access::read);
    EXPECT_TRUE(holds(*sound, 2));
}

// Whatever a disk does, a pin gives exact bytes or a typed error, and the pager goes on. Method: seeds of mixed
// faults, 40 random accesses each, also of segments that raised before.
TEST(PagerFaults, ExactBytesOrTypedErrorUnderAnyFault) {
    const SimChances chances{100, 60, 60, 100, 20, 2, 10, 10, 3, 3};
    int checked = 0;
    int raised = 0;
    for (const std::uint64_t seed : seeds({.usual = 200, .full = 5'000})) {
        FaultyPager f(seed, chances, 6);
        std::mt19937_64 random(seed);
        std::vector<std::shared_ptr<Segment>> segments;
        std::vector<std::uint32_t> holding;
        for (std::uint32_t i = 0; i < 6; ++i) {
            try {
                segments.push_back(filled_segment(f.pager, 2, i));
                holding.push_back(i);
            } catch (const TierIoError&) {
                ++raised;  // of an earlier write-back; this segment was not made
            }
        }
        for (int step = 0; step < 40 && !segments.empty(); ++step) {
            const std::size_t i = random() % segments.size();
            try {
                const bool is_write = random() % 2 == 0;
                const PinGuard guard = pin(f.pager, segments[i], is_write ? Access::write : Access::read);
                ASSERT_TRUE(holds(*segments[i], holding[i])) << "seed " << seed << " step " << step;
                if (is_write) fill(*segments[i], ++holding[i]);
                ++checked;
            } catch (const TierIoError&) {
                ++raised;
            } catch (const OutOfTierMemory&) {
                ++raised;  // pages that cannot be written hold their memory
            }
        }
    }
    EXPECT_GT(checked, 2000);
    EXPECT_GT(raised, 50);
}

}  // namespace
}  // namespace torch_offload::test
