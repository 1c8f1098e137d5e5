#include <gtest/gtest.h>

#include <random>

#include "support/pager_fixture.h"
#include "support/seeds.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

struct FaultyPager {
    explicit FaultyPager(std::uint64_t seed = 1, const SimChances& chances = {}, std::size_t budget_pages = 12)
        : engine(new SimEngine(8, seed, chances)),
          pager(options_with(budget_pages), std::unique_ptr<IoEngine>(engine)) {}

    SimEngine* engine;  // the pager's
    Pager pager;
};

// A read that fails twice is a typed error at the access, and stays one; other pages go on. Method: scripted EIO.
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

// An access behind the dispatcher that cannot be served ends on 0xFF, and the next pin raises why. Method: EIO, read
// raw.
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
