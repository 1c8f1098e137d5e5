// What the pager does about transfers that do not end.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "pager/pager_dump.h"
#include "support/late_pager.h"
#include "support/log_capture.h"

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;

struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// The errno of the TierIoError that `body` throws; 0: it throws none.
int error_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const TierIoError& error) {
        return error.error_number();
    }
    return 0;
}

// A read that does not end is named in the log and raised as ETIMEDOUT, to everybody who waits for it; once it ends,
// the page is there. Method: a shut disk, two accesses one after the other, then an open one.
TEST(PagerLate, ReadThatDoesNotEndIsRaised) {
    const LogCapture log(LogLevel::warning);
    LatePager late;
    const auto segment = filled_segment(late.pager, 1, 1);
    const auto resident = filled_segment(late.pager, 1, 2);
    ASSERT_EQ(late.pager.evict(segment), 0u);
    late.disk().shut();
    for (int access = 0; access < 2; ++access) {
        EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, segment, Access::read)); }), ETIMEDOUT);
    }
    EXPECT_EQ(error_of([&] { late.pager.evict(segment); }), ETIMEDOUT) << "nobody waits for it any longer";
    {
        const PinGuard guard = pin(late.pager, resident, Access::write);
        EXPECT_TRUE(holds(*resident, 2));
    }
    EXPECT_TRUE(
        comes_true([&] { return log.lines().find("reading page 0 of segment 1 (offset ") != std::string::npos; }));
    late.disk().open();
    ASSERT_TRUE(comes_true([&] { return late.pager.is_resident(*segment); }));
    const PinGuard guard = pin(late.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// A transfer is not late for the time in which the thread that takes its end did not run, as in a process that was
// stopped. Method: that thread sleeps for longer than a transfer may take, and the disk answers at its next look.
TEST(PagerLate, TimeInWhichNobodyLookedIsNotTheDisks) {
    const LogCapture log(LogLevel::warning);
    PagerOptions options = options_with(8);
    options.transfer_limits.timeout = milliseconds(600);
    auto* const disk = new GatedEngine;
    Pager pager(options, std::unique_ptr<IoEngine>(disk));
    const auto segment = filled_segment(pager, 1, 1);
    ASSERT_EQ(pager.evict(segment), 0u);
    disk->shut();
    disk->open_after(milliseconds(800));
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
    EXPECT_EQ(log.lines().find("has taken"), std::string::npos) << log.lines();
}

// Who needs the memory of a page whose write does not end is told so, and so is who needs the page; nothing is lost.
// Method: a shut disk and more memory wanted than is free, then an open one.
TEST(PagerLate, WriteThatDoesNotEndIsRaised) {
    LatePager late;
    const auto leaving = filled_segment(late.pager, 6, 1);
    late.disk().shut();
    const auto more = late.pager.create_segment(5 * kPageBytes, 4, SegmentKind::parameter);
    EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, more, Access::overwrite)); }), ETIMEDOUT);
    EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, leaving, Access::read)); }), ETIMEDOUT);
    late.disk().open();
    const auto overwrite = [&] {
        const PinGuard guard = pin(late.pager, more, Access::overwrite);
        fill(*more, 2);
    };
    ASSERT_TRUE(comes_true([&] { return error_of(overwrite) == 0; })) << "once what was late has ended";
    for (int round = 0; round < 2; ++round) {
        {
            const PinGuard guard = pin(late.pager, leaving, Access::read);
            EXPECT_TRUE(holds(*leaving, 1));
        }
        const PinGuard guard = pin(late.pager, more, Access::read);
        EXPECT_TRUE(holds(*more, 2));
    }
}

// Transfers that the store has not submitted, since those before them do not end, are late as well: who needs their
// memory is told so. Method: a shut disk and more pages to write than transfers are in flight at once.
TEST(PagerLate, WriteBehindOthersThatDoNotEndIsRaised) {
    LatePager late(milliseconds(50), 24);
    const auto leaving = filled_segment(late.pager, 20, 1);
    late.disk().shut();
    EXPECT_EQ(error_of([&] { late.pager.evict(leaving); }), ETIMEDOUT);
    EXPECT_LT(late.disk().order().size(), 20u) << "some wait behind others";
    EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, leaving, Access::read)); }), ETIMEDOUT);
    late.disk().open();
    ASSERT_TRUE(comes_true([&] { return error_of([&] { late.pager.evict(leaving); }) == 0; }));
    const PinGuard guard = pin(late.pager, leaving, Access::read);
    EXPECT_TRUE(holds(*leaving, 1));
}

// A disk that does not answer is given nothing more to write: who waits for memory is told at once, and what is in
// memory stays usable. Method: a shut disk, one write that is late, then a full memory.
TEST(PagerLate, HungDiskGetsNoMoreWrites) {
    LatePager late;
    const auto late_one = filled_segment(late.pager, 1, 1);
    const auto resident = filled_segment(late.pager, 5, 2);
    late.disk().shut();
    EXPECT_EQ(error_of([&] { late.pager.evict(late_one); }), ETIMEDOUT);
    const auto more = late.pager.create_segment(5 * kPageBytes, 4, SegmentKind::parameter);
    const std::string before = late.disk().order();
    for (int attempt = 0; attempt < 3; ++attempt) {
        EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, more, Access::overwrite)); }), ETIMEDOUT);
    }
    EXPECT_EQ(late.disk().order(), before);
    {
        const PinGuard guard = pin(late.pager, resident, Access::write);
        EXPECT_TRUE(holds(*resident, 2));
    }
    late.disk().open();
    ASSERT_TRUE(comes_true(
        [&] { return error_of([&] { static_cast<void>(pin(late.pager, more, Access::overwrite)); }) == 0; }));
}

// Waits for a read and for memory end as the program's interrupt check says, whether or not the disk answers one day;
// nothing is lost. Method: a check that throws, a disk that is shut, then open.
TEST(PagerLate, WaitsAreInterrupted) {
    LatePager late(std::chrono::hours(1));
    const auto stored = filled_segment(late.pager, 2, 1);
    ASSERT_EQ(late.pager.evict(stored), 0u);
    const auto leaving = filled_segment(late.pager, 6, 2);
    late.disk().shut();
    set_interrupt_check([] { throw Interrupted("enough"); });
    const auto more = late.pager.create_segment(5 * kPageBytes, 4, SegmentKind::parameter);
    const auto has_begun = [&](char direction) { return late.disk().order().find(direction) != std::string::npos; };
    std::thread reader([&] { EXPECT_THROW(static_cast<void>(pin(late.pager, stored, Access::read)), Interrupted); });
    EXPECT_TRUE(comes_true([&] { return has_begun('r'); }));
    std::thread writer([&] { EXPECT_THROW(static_cast<void>(pin(late.pager, more, Access::overwrite)), Interrupted); });
    EXPECT_TRUE(comes_true([&] { return has_begun('w'); }));
    EXPECT_THROW(late.pager.flush(), Interrupted);
    reader.join();
    writer.join();
    set_interrupt_check(nullptr);
    late.disk().open();
    {
        const PinGuard guard = pin(late.pager, stored, Access::read);
        EXPECT_TRUE(holds(*stored, 1));
    }
    const PinGuard guard = pin(late.pager, leaving, Access::read);
    EXPECT_TRUE(holds(*leaving, 2));
}

// Nothing more is read ahead while a thread waits for all transfers to end, or it could wait for ever; afterwards it
// is. Method: a shut disk with a read under way, and another one that is asked for meanwhile.
TEST(PagerLate, NothingIsReadAheadDuringFlush) {
    LatePager late(std::chrono::hours(1));
    const auto first = filled_segment(late.pager, 1, 1);
    const auto second = filled_segment(late.pager, 1, 2);
    ASSERT_EQ(late.pager.evict(first) + late.pager.evict(second), 0u);
    late.disk().shut();
    late.pager.prefetch(first);
    ASSERT_TRUE(comes_true([&] { return late.disk().order() == "r"; }));
    std::thread flusher([&] { late.pager.flush(); });
    EXPECT_TRUE(comes_true([&] { return !late.pager.dump().waits.empty(); }));
    late.pager.prefetch(second);
    EXPECT_EQ(late.pager.dump().moving_pages, 1u);
    late.disk().open();
    flusher.join();
    EXPECT_TRUE(comes_true([&] { return late.pager.is_resident(*second); }));
}

// A pager over a disk that does not answer ends all the same.
TEST(PagerLate, EndsWithoutItsDisk) {
    const LogCapture log(LogLevel::error);
    LatePager late;
    auto segment = filled_segment(late.pager, 1, 1);
    ASSERT_EQ(late.pager.evict(segment), 0u);
    late.disk().shut();
    EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, segment, Access::read)); }), ETIMEDOUT);
    segment.reset();
    late.end_pager();
    EXPECT_NE(log.lines().find("1 transfers do not end: the engine ends without them"), std::string::npos);
}

// An access behind the dispatcher ends, and its error is raised by the next pin, although the disk does not answer;
// once it does, the bytes are there.
TEST(PagerLate, AccessBehindTheDispatcherEnds) {
    const LogCapture log(LogLevel::error);
    LatePager late;
    const auto segment = filled_segment(late.pager, 1, 1);
    const auto resident = filled_segment(late.pager, 1, 2);
    ASSERT_EQ(late.pager.evict(segment), 0u);
    late.disk().shut();
    const std::byte seen = *static_cast<const volatile std::byte*>(segment->range().data());
    EXPECT_EQ(seen, std::byte{0xFF});
    EXPECT_EQ(error_of([&] { static_cast<void>(pin(late.pager, resident, Access::read)); }), ETIMEDOUT);
    late.disk().open();
    ASSERT_TRUE(comes_true([&] { return late.pager.is_resident(*segment); }));
    const PinGuard guard = pin(late.pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// A pager ends while its service thread waits for the disk, for deferred work that nobody needs any longer.
TEST(PagerLate, EndsWhileDeferredWorkWaits) {
    LatePager late(std::chrono::hours(1));
    auto stored = filled_segment(late.pager, 1, 1);
    auto updated = filled_segment(late.pager, 1, 2);
    ASSERT_EQ(late.pager.evict(stored), 0u);
    std::atomic<bool> has_ended_early{false};
    late.pager.set_pending_work(
        [&, read = std::weak_ptr(stored)](Segment&, std::size_t, bool) -> bool {
            try {
                const PinGuard guard = pin(late.pager, read.lock(), Access::read);
            } catch (const OffloadError&) {
                has_ended_early = true;
                throw;
            }
            return true;
        },
        [updated = std::weak_ptr(updated)](Segment&) { return std::vector{updated.lock()}; });
    ASSERT_TRUE(late.pager.set_pending(*updated, 0));
    late.disk().shut();
    late.pager.prefetch(updated);
    ASSERT_TRUE(comes_true([&] { return late.disk().order() == "r"; }));
    stored.reset();
    updated.reset();
    late.end_pager();
    EXPECT_TRUE(has_ended_early);
}

}  // namespace
}  // namespace torch_offload::test
