// What a pager says of itself when nothing moves.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "device/address_space.h"
#include "device/emulated_device.h"
#include "pager/pager_dump.h"
#include "support/late_pager.h"
#include "support/three_tiers.h"

namespace torch_offload::test {
namespace {

/// Does not listen while it is deaf.
class DeafEngine final : public GatedEngine {
public:
    void wake() noexcept override {
        if (!is_deaf) GatedEngine::wake();
    }
    std::atomic<bool> is_deaf{false};
};

/// A thread that debuggers show as "waiter".
template <typename Body>
std::thread waiter(Body body) {
    return std::thread([body] {
        pthread_setname_np(pthread_self(), "waiter");
        body();
    });
}

/// Of the waits that the thread above is in.
bool has_wait(Pager& pager, StallCause cause, const std::string& page) {
    for (const ThreadWait& each : pager.dump().waits) {
        if (each.thread_name == "waiter" && each.wait.cause == cause && each.wait.page == page) return true;
    }
    return false;
}

/// The least time in which the oldest wait of the dump has been under way, and whether they are in order.
bool are_oldest_first(const PagerDump& dump) {
    return std::ranges::is_sorted(dump.waits, std::ranges::greater(),
                                  [](const ThreadWait& each) { return each.wait.age; });
}

std::size_t pages_in(const PagerDump& dump, PageState state) {
    return dump.pages.by_state[static_cast<std::size_t>(state)];
}

// Who waits for a read is listed with its page until it has it; the transfer is described meanwhile.
// Method: a disk that is shut, then open.
TEST(PagerDump, WaitForReadIsListedWhileItLasts) {
    LatePager late(std::chrono::hours(1));
    const auto segment = filled_segment(late.pager, 2, 1);
    ASSERT_EQ(late.pager.evict(segment), 0u);
    ASSERT_TRUE(late.pager.dump().waits.empty());
    ASSERT_TRUE(late.pager.dump().transfers.empty());
    late.disk().shut();
    std::thread reader = waiter([&] { static_cast<void>(late.pager.pin_pages(segment, 1, 1, Access::read)); });
    EXPECT_TRUE(comes_true([&] { return has_wait(late.pager, StallCause::read, "page 1 of segment 1"); }));
    const PagerDump dump = late.pager.dump();
    ASSERT_EQ(dump.transfers.size(), 2u);
    EXPECT_EQ(dump.transfers[0].find("ssd tier: reading page 1 of segment 1 (offset "), 0u) << dump.transfers[0];
    EXPECT_NE(dump.transfers[1].find("1 reads and 0 writes are under way"), std::string::npos) << dump.transfers[1];
    EXPECT_EQ(dump.program_waiters, 1);
    EXPECT_EQ(dump.moving_pages, 1u);
    EXPECT_EQ(pages_in(dump, PageState::loading), 1u);
    EXPECT_EQ(pages_in(dump, PageState::stored), 1u);
    late.disk().open();
    reader.join();
    const PagerDump after = late.pager.dump();
    EXPECT_TRUE(after.waits.empty());
    EXPECT_TRUE(after.transfers.empty());
    EXPECT_EQ(after.program_waiters, 0);
}

// So is who waits for memory, for pages to leave, for all transfers to end, and for an access behind the dispatcher.
// Method: one thread each, at a disk that is shut.
TEST(PagerDump, OtherWaitsAreListed) {
    LatePager late(std::chrono::hours(1));
    const auto stored = filled_segment(late.pager, 1, 1);
    ASSERT_EQ(late.pager.evict(stored), 0u);
    const auto leaving = filled_segment(late.pager, 6, 2);
    const auto more = late.pager.create_segment(5 * kPageBytes, 4, SegmentKind::parameter);
    late.disk().shut();
    std::thread evicter = waiter([&] { late.pager.evict(leaving); });
    EXPECT_TRUE(comes_true([&] { return has_wait(late.pager, StallCause::memory, "page 0 of segment 2"); }));
    std::thread flusher = waiter([&] { late.pager.flush(); });
    EXPECT_TRUE(comes_true([&] { return has_wait(late.pager, StallCause::memory, ""); }));
    std::thread reader = waiter([&] { static_cast<void>(*static_cast<volatile std::byte*>(stored->range().data())); });
    EXPECT_TRUE(comes_true([&] { return has_wait(late.pager, StallCause::fault, "page 0 of segment 1"); }));
    std::thread writer = waiter([&] { static_cast<void>(pin(late.pager, more, Access::overwrite)); });
    EXPECT_TRUE(comes_true([&] { return late.pager.dump().memory_waiters == 1; }));
    EXPECT_TRUE(are_oldest_first(late.pager.dump()));
    EXPECT_GE(late.pager.dump().waits.size(), 4u);
    late.disk().open();
    for (std::thread* thread : {&evicter, &flusher, &reader, &writer}) thread->join();
    EXPECT_TRUE(comes_true([&] { return late.pager.dump().waits.empty(); })) << "the service thread's included";
}

// Of a device, each tier says its part: the program waits for the device's page, the device's thread for the host's.
TEST(PagerDump, EachTierSaysItsPart) {
    EmulatedDevice device;
    auto owned_disk = std::make_unique<GatedEngine>();
    GatedEngine& disk = *owned_disk;
    Pager host(ThreeTiers::with_device(24, device, nullptr), std::move(owned_disk));
    Pager top(ThreeTiers::of_device(8, device, UpdatesOn::device, nullptr), std::make_unique<TierStore>(host, device));
    const auto segment = filled_segment(top, 1, 1);
    ASSERT_EQ(top.evict(segment), 0u);
    disk.shut();
    std::thread reader = waiter([&] { static_cast<void>(pin(top, segment, Access::read)); });
    EXPECT_TRUE(comes_true([&] { return has_wait(top, StallCause::read, "page 0 of segment 1"); }));
    const std::vector<std::string> copies = {"emulated: 1 copies to the device and 0 to the host are under way"};
    EXPECT_EQ(top.dump().transfers, copies);
    const auto waits_below = [&] {
        const PagerDump dump = host.dump();
        return dump.waits.size() == 1 && dump.waits[0].thread_name == "to-up" &&
               dump.waits[0].wait.page == "page 0 of segment 1" && dump.transfers.size() == 2;
    };
    EXPECT_TRUE(comes_true(waits_below));
    EXPECT_EQ(host.dump().program_waiters, 0);
    disk.open();
    reader.join();
    EXPECT_TRUE(top.dump().transfers.empty());
}

// Pages may move and segments come and go while they are counted. Method: threads that use more pages than fit, and
// make and drop some, beside one that dumps.
TEST(PagerDump, PagesMoveMeanwhile) {
    Pager pager(options_with(6), std::make_unique<GatedEngine>());
    std::atomic<int> left{3};
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&, thread] {
            const auto kept = filled_segment(pager, 2, thread);
            for (std::uint32_t round = 0; round < 100; ++round) {
                static_cast<void>(filled_segment(pager, 1, round));
                const PinGuard guard = pager.pin_pages(kept, round % 2, 1, Access::read);
            }
            --left;
        });
    }
    do {
        const PagerDump dump = pager.dump();
        EXPECT_LE(dump.memory.peak_bytes, 6 * kPageBytes);
        EXPECT_LE(pages_in(dump, PageState::mapped), 6u);
    } while (left > 0);
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(pager.dump().waits.empty());
}

// Pages are counted by state and by what holds them.
TEST(PagerDump, PagesAreCounted) {
    Pager pager(options_with(8), std::make_unique<GatedEngine>());
    const auto stored = filled_segment(pager, 2, 1);
    ASSERT_EQ(pager.evict(stored), 0u);
    const auto dirty = filled_segment(pager, 3, 2);
    const auto zero = pager.create_segment(kPageBytes, 4, SegmentKind::state);
    const auto pending = filled_segment(pager, 1, 3);
    pager.set_pending_work([](Segment&, std::size_t, bool) { return false; },
                           [&](Segment&) { return std::vector<std::shared_ptr<Segment>>{}; });
    ASSERT_TRUE(pager.set_pending(*pending, 0));
    const PinGuard guard = pager.pin_pages(dirty, 0, 2, Access::read);
    const PagerDump dump = pager.dump();
    ASSERT_TRUE(dump.has_locked_part);
    EXPECT_EQ(pages_in(dump, PageState::stored), 2u);
    EXPECT_EQ(pages_in(dump, PageState::mapped), 3u);
    EXPECT_EQ(pages_in(dump, PageState::zero), 1u);
    EXPECT_EQ(pages_in(dump, PageState::loaded), 1u);
    EXPECT_EQ(dump.pages.pinned, 2u);
    EXPECT_EQ(dump.pages.dirty, 4u);
    EXPECT_EQ(dump.pages.pending, 1u);
    EXPECT_EQ(dump.pages.failed_transfer, 0u);
    EXPECT_EQ(dump.memory.limit_bytes, 8 * kPageBytes);
}

// A pager whose lock somebody has says so, and what can be said without it. Method: a thread that waits for the
// predictor under the lock, beside one that waits for a disk that is shut.
TEST(PagerDump, EndsWhileTheLockIsHeld) {
    auto owned_disk = std::make_unique<GatedEngine>();
    GatedEngine& disk = *owned_disk;
    Pager pager(options_with(8), std::move(owned_disk));
    const auto predictor = std::make_shared<UsePredictor>();
    pager.follow(predictor);
    const auto segment = filled_segment(pager, 1, 1);
    const auto resident = filled_segment(pager, 1, 2);
    ASSERT_EQ(pager.evict(segment), 0u);
    disk.shut();
    std::thread reader = waiter([&] { static_cast<void>(pin(pager, segment, Access::read)); });
    EXPECT_TRUE(comes_true([&] { return has_wait(pager, StallCause::read, "page 0 of segment 1"); }));
    std::thread holder;
    {
        const UsePredictor::Held held = predictor->hold();
        holder = waiter([&] { pager.set_anchor(*resident, 1); });
        PagerDump dump;
        EXPECT_TRUE(comes_true([&] {
            dump = pager.dump();
            return !dump.has_locked_part;
        }));
        EXPECT_EQ(dump.waits.size(), 1u);
        EXPECT_EQ(dump.transfers.size(), 2u);
    }
    disk.open();
    holder.join();
    reader.join();
    EXPECT_TRUE(pager.dump().has_locked_part);
}

// A disk thread that does not look is not waited for.
TEST(PagerDump, EndsWhereTheDiskThreadDoesNotAnswer) {
    auto owned_disk = std::make_unique<DeafEngine>();
    DeafEngine& disk = *owned_disk;
    Pager pager(options_with(8), std::move(owned_disk));
    disk.is_deaf = true;
    EXPECT_TRUE(comes_true([&] {  // it may still have had something to do
        const std::vector<std::string> lines = pager.dump().transfers;
        return lines.size() == 1 && lines[0].find("I/O thread does not answer") != std::string::npos;
    }));
    disk.is_deaf = false;
    EXPECT_TRUE(pager.dump().transfers.empty());
}

// Waits come and go while others are listed. Method: threads that enter and leave beside one that looks.
TEST(PagerDump, WaitsComeAndGoMeanwhile) {
    WaitList list;
    std::atomic<int> left{3};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&] {
            for (int round = 0; round < 2000; ++round) {
                const WaitList::Entry outer(list, StallCause::update);
                const WaitList::Entry inner(list, StallCause::read);
            }
            --left;
        });
    }
    do {
        EXPECT_LE(list.waits().size(), 6u);
    } while (left > 0);
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(list.waits().empty());
}

}  // namespace
}  // namespace torch_offload::test
