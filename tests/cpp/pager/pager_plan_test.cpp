// What the pager does of its own accord: when it reads ahead, when it runs deferred work, how it feeds the disk.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <numeric>
#include <thread>
#include <vector>

#include "pager/pager.h"
#include "pager/rank_wait.h"
#include "support/fake_clock.h"
#include "support/gated_engine.h"
#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;

bool are_all(const Segment& segment, PageState state) {
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        if (segment.page(i).load().state() != state) return false;
    }
    return true;
}

std::shared_ptr<Segment> with_role(Pager& pager, std::uint32_t seed) { return segment_with_role(pager, 1, seed); }

// Reads and writes that wait together go to the disk in batches of one direction, few at a time. Method: a disk that
// finishes nothing until 24 pages wait to come and 24 to leave, then one after the other.
TEST(PagerPlan, DiskIsFedInBatches) {
    constexpr std::size_t kPages = 24;
    const FakeClock clock;  // no shape that the arbiter tries is measured, so it stays with the first
    auto made = std::make_unique<GatedEngine>();
    GatedEngine& disk = *made;
    const PagerOptions options = options_with(4 * kPages);
    Pager pager(options, std::move(made));
    const auto coming = filled_segment(pager, kPages, 1);
    const auto leaving = filled_segment(pager, kPages, 2);
    ASSERT_EQ(pager.evict(coming), 0u);
    disk.shut();
    std::thread reader([&] {
        const PinGuard guard = pin(pager, coming, Access::read);
        EXPECT_TRUE(holds(*coming, 1));
    });
    std::thread writer([&] { EXPECT_EQ(pager.evict(leaving), 0u); });
    ASSERT_TRUE(comes_true([&] {
        return are_all(*coming, PageState::loading) && are_all(*leaving, PageState::evicting) && disk.most() == 8u;
    }));
    const std::string first = disk.order();
    for (std::size_t i = 0; i < 2 * kPages; ++i) {
        disk.finish_one();
        ASSERT_TRUE(comes_true([&] { return disk.order().size() >= std::min(first.size() + i + 1, 2 * kPages); }));
    }
    disk.open();
    reader.join();
    writer.join();

    const std::string order = disk.order();
    EXPECT_EQ(order.size(), 2 * kPages);
    EXPECT_EQ(disk.most(), 8u);  // the first shape that the arbiter tries
    const std::size_t both_end = std::min(order.find_last_of('r'), order.find_last_of('w'));
    const std::string both = order.substr(first.size(), both_end - first.size());
    EXPECT_EQ(both.find("rrrrr"), std::string::npos) << order;
    EXPECT_EQ(both.find("wwwww"), std::string::npos) << order;
    EXPECT_NE(both.find("rrrrwwww"), std::string::npos) << order;
}

/// Steps of some segments used 20 ms after each other and one used at the end, by a clock that stands still while the
/// pager looks ahead. `watch` is told how many there were.
class PagerDeadlines : public testing::TestWithParam<int> {
protected:
    static constexpr milliseconds kPause{20};

    PagerDeadlines() {
        for (int seed = 0; seed < uses(); ++seed) early_.push_back(with_role(pager_, static_cast<std::uint32_t>(seed)));
    }

    static int uses() { return GetParam(); }
    /// So long before its use a read begins.
    static milliseconds margin() { return std::min(milliseconds(100), uses() * kPause / 8); }

    void step(const std::function<void(int)>& watch = [](int) {}) {
        for (int use = 0; use < uses(); ++use) {
            pager_.touch(early_.at(use));
            ASSERT_NO_FATAL_FAILURE(await_look_ahead());
            watch(use);
            clock_.advance(kPause);
        }
        pager_.touch(late_);
        pager_.end_step();
        ASSERT_NO_FATAL_FAILURE(await_look_ahead());
    }

    /// The store's thread looks whether it was told to between two calls of reap(). What it is doing now may be past
    /// that point, so the second call from now on is the first that begins after it has looked ahead.
    void await_look_ahead() {
        const std::uint64_t before = disk_->reaps();
        for (const std::uint64_t calls : {1u, 2u}) {
            disk_->wake();
            ASSERT_TRUE(comes_true([&] { return disk_->reaps() >= before + calls; }));
        }
    }

    FakeClock clock_;
    GatedEngine* disk_ = new GatedEngine;  // the pager's
    Pager pager_{options_with(128), std::unique_ptr<IoEngine>(disk_)};
    std::vector<std::shared_ptr<Segment>> early_;
    std::shared_ptr<Segment> late_ = with_role(pager_, static_cast<std::uint32_t>(uses()));
};

// A moment that the passes use by itself goes by that use, and not by that of its parameter, which deferred work on it
// would wait for. Method: a parameter used first, its moment last, another segment between; memory that is short at the
// end of a pass.
TEST(PagerPlan, MomentUsedByItselfGoesByThatUse) {
    constexpr std::size_t kPages = 2;
    Pager pager(options_with(4 * kPages), std::make_unique<SimEngine>(8, 1));
    const auto weight = segment_with_role(pager, kPages, 1);
    const auto other = segment_with_role(pager, kPages, 2);
    const auto moment = pager.create_segment(kPages * kPageBytes, 4, SegmentKind::state);
    moment->trace_id = pager.new_trace_id();
    pager.set_anchor(*moment, weight->trace_id);
    for (int pass = 0; pass < 3; ++pass) {
        if (pass > 0) pager.end_step();
        for (const auto& segment : {weight, other, moment}) {
            pager.touch(segment);
            const PinGuard used = pin(pager, segment, Access::write);
        }
    }
    const auto more = pager.create_segment(kPages * kPageBytes, 4, SegmentKind::other);
    const PinGuard pressing = pin(pager, more, Access::overwrite);
    EXPECT_TRUE(pager.is_resident(*weight));
    EXPECT_TRUE(pager.is_resident(*other));
    EXPECT_FALSE(pager.is_resident(*moment));
}

// What the forward pass made last is used first by the backward pass, and stays. Method: passes that make an activation
// and then use it with nothing in between; memory that is short right after it was made.
TEST(PagerPlan, ActivationThatIsUsedAtOnceStays) {
    constexpr std::size_t kPages = 2;
    Pager pager(options_with(2 * kPages + 1), std::make_unique<SimEngine>(8, 1));  // one is kept free
    const auto weight = segment_with_role(pager, kPages, 1);
    const auto made = pager.create_segment(kPages * kPageBytes, 4, SegmentKind::activation);
    made->trace_id = pager.new_trace_id();
    const auto use = [&](const std::shared_ptr<Segment>& segment, Access access) {
        pager.touch(segment);
        const PinGuard used = pin(pager, segment, access);
    };
    for (int pass = 0; pass < 3; ++pass) {
        use(weight, Access::read);
        use(made, Access::overwrite);
        use(made, Access::read);
        use(weight, Access::read);
        pager.end_step();
    }
    use(weight, Access::read);
    use(made, Access::overwrite);
    const auto more = pager.create_segment(kPages * kPageBytes, 4, SegmentKind::other);
    const PinGuard pressing = pin(pager, more, Access::overwrite);
    EXPECT_TRUE(pager.is_resident(*made));
    EXPECT_FALSE(pager.is_resident(*weight));
}

// What is used late in a step is read shortly before, not at once: its memory serves others meanwhile; in a short step
// still later. Method: a use 1,200, 600 or 240 ms after the step's begin; the read begins at the first use that is no
// more than the margin before it.
INSTANTIATE_TEST_SUITE_P(Steps, PagerDeadlines, testing::Values(60, 30, 12));
TEST_P(PagerDeadlines, ReadsComeShortlyBeforeTheirUse) {
    ASSERT_NO_FATAL_FAILURE(step());
    ASSERT_NO_FATAL_FAILURE(step());
    ASSERT_EQ(pager_.evict(late_), 0u);
    int read_at = -1;
    ASSERT_NO_FATAL_FAILURE(step([&](int use) {
        if (read_at < 0 && pager_.statistics().prefetches > 0) read_at = use;
    }));
    EXPECT_EQ(read_at, uses() - margin() / kPause);
    EXPECT_EQ(pager_.statistics().prefetches, 1u);
}

constexpr std::size_t kSweptPages = 512;  // so many that those on their way are a small share of half of them

/// Pages that are read in a sweep over twice the budget, once sweeps have come to be alike.
std::uint64_t reads_of_a_sweep(bool are_passes) {
    const auto read_bytes = [](const Pager& pager) {
        const PagerStatistics now = pager.statistics();
        return std::accumulate(std::begin(now.read_bytes), std::end(now.read_bytes), std::uint64_t{0});
    };
    constexpr int kWarmUp = 4;
    constexpr std::uint64_t kSweeps = 4;
    Pager pager(options_with(kSweptPages / 2), std::make_unique<SimEngine>(8, 1));
    std::vector<std::shared_ptr<Segment>> weights;
    for (std::uint32_t seed = 0; seed < kSweptPages; ++seed) weights.push_back(with_role(pager, seed));
    std::uint64_t before = 0;
    for (int sweep = 0; sweep < kWarmUp + static_cast<int>(kSweeps); ++sweep) {
        if (sweep == kWarmUp) before = read_bytes(pager);
        if (are_passes) pager.begin_pass(1);
        for (std::uint32_t seed = 0; seed < kSweptPages; ++seed) {
            pager.touch(weights[seed]);
            const PinGuard guard = pin(pager, weights[seed], Access::read);
            EXPECT_TRUE(holds(*weights[seed], seed));
        }
    }
    return (read_bytes(pager) - before) / (kSweeps * weights.front()->page_bytes());
}

// A program that only runs forward keeps most of what it can of the weights from pass to pass, where one that says
// nothing of its passes reads all of them again. Method: sweeps over twice the budget; the least that has to be read is
// half.
TEST(PagerPlan, PassesKeepWhatFits) {
    EXPECT_EQ(reads_of_a_sweep(false), kSweptPages);
    const std::uint64_t reads = reads_of_a_sweep(true);
    EXPECT_GE(reads, kSweptPages / 2);
    EXPECT_LE(reads, kSweptPages * 3 / 4);  // what is read ahead takes memory, too: more of it where threads are slow
}

/// Waits for other ranks until nothing more is read ahead.
void wait_for_ranks(Pager& pager) {
    const RankWait wait(pager);
    std::uint64_t before = 0;
    do {
        before = pager.statistics().prefetches;
        pager.kick();
        std::this_thread::sleep_for(milliseconds(1));  // the disk's thread looks ahead meanwhile
    } while (pager.statistics().prefetches != before);
}

// What is read ahead has room beside other memory that the step takes until then: it would give way to that, and be
// read again. Method: steps whose uses have two thirds of the budget taken and given back between them, while ranks
// wait for one another; no page is read more than once in a step.
TEST(PagerPlan, WhatIsReadAheadHasRoomBesideOtherMemory) {
    constexpr std::uint32_t kWeights = 64;
    constexpr std::size_t kBudget = 48;
    Pager pager(options_with(kBudget), std::make_unique<SimEngine>(8, 1));
    std::vector<std::shared_ptr<Segment>> weights;
    for (std::uint32_t seed = 0; seed < kWeights; ++seed) weights.push_back(with_role(pager, seed));
    std::uint64_t before = 0;
    for (int step = 0; step < 5; ++step) {
        if (step == 3) before = total(pager.statistics().read_bytes);
        for (std::uint32_t seed = 0; seed < kWeights; ++seed) {
            pager.free_range(pager.allocate_range(kBudget * 2 / 3 * kPageBytes));
            pager.touch(weights[seed]);
            const PinGuard guard = pin(pager, weights[seed], Access::read);
            EXPECT_TRUE(holds(*weights[seed], seed));
            wait_for_ranks(pager);
        }
        pager.end_step();
    }
    EXPECT_GT(pager.statistics().prefetches, kWeights);
    EXPECT_LE(total(pager.statistics().read_bytes) - before, 2 * kWeights * kPageBytes);
}

// What a first pass is expected to use is read before it is used, in this order, though nothing is recorded. Method:
// pages on the disk, and a pass that begins, without and with an expectation.
TEST(PagerPlan, FirstPassIsReadAhead) {
    constexpr std::uint32_t kPages = 64;
    Pager pager(options_with(kPages / 2), std::make_unique<SimEngine>(8, 1));
    std::vector<std::shared_ptr<Segment>> weights;
    for (std::uint32_t seed = 0; seed < kPages; ++seed) {
        weights.push_back(with_role(pager, seed));
        ASSERT_EQ(pager.evict(weights.back()), 0u);
    }
    pager.expect_pass(1, weights);
    pager.kick();
    EXPECT_EQ(pager.statistics().prefetches, 0u);  // no pass of the program has begun
    pager.begin_pass(1);
    ASSERT_TRUE(comes_true([&] {
        pager.kick();
        return pager.is_resident(*weights[7]);
    }));
    EXPECT_FALSE(pager.is_resident(*weights.back()));
    for (std::uint32_t seed = 0; seed < kPages; ++seed) {
        pager.touch(weights[seed]);
        const PinGuard guard = pin(pager, weights[seed], Access::read);
        EXPECT_TRUE(holds(*weights[seed], seed));
    }
}

// A segment may end while it is looked at, and whoever is its last owner takes the pager's lock. Method: thousands of
// weights that are dropped and made again in a recorded pass, which only looks at them, as they are requested for each
// use, while another thread has the pager look ahead.
TEST(PagerPlan, SegmentsMayEndWhileTheyAreLookedAt) {
    constexpr std::uint32_t kRoles = 64;
    constexpr int kPasses = 400;
    Pager pager(options_with(2 * kRoles), std::make_unique<SimEngine>(8, 1));
    std::vector<std::shared_ptr<Segment>> weights;
    for (std::uint32_t seed = 0; seed < kRoles; ++seed) weights.push_back(with_role(pager, seed));
    std::atomic<bool> is_over{false};
    std::thread looking([&] {
        while (!is_over.load()) const RankWait wait(pager);  // each has the disk's thread look ahead
    });
    for (int pass = 0; pass < kPasses; ++pass) {
        pager.begin_pass(1);
        for (std::shared_ptr<Segment>& weight : weights) {
            const TraceId role = weight->trace_id;
            weight.reset();
            weight = filled_segment(pager, 1, 0, role);
            weight->requested_uses.store(2);  // of which the use is one
            pager.touch(weight);
        }
    }
    is_over.store(true);
    looking.join();
    pager.begin_pass(1);
    EXPECT_EQ(total(pager.statistics().read_bytes), 0u);  // there was room for all: nothing had to be read
}

// Requests are kept until their turn comes, in their order, and are worthless after a use. Method: forty segments at
// once, far more than the disk is given; all arrive, the first before the last. Then one that is used before its turn.
TEST(PagerPlan, PrefetchRequestsWaitForTheirTurn) {
    auto made = std::make_unique<GatedEngine>();
    GatedEngine& disk = *made;
    Pager pager(options_with(256), std::move(made));
    std::vector<std::shared_ptr<Segment>> wanted;
    for (std::uint32_t seed = 0; seed < 40; ++seed) wanted.push_back(filled_segment(pager, 1, seed));
    for (const auto& segment : wanted) ASSERT_EQ(pager.evict(segment), 0u);
    disk.shut();
    for (const auto& segment : wanted) pager.prefetch(segment);
    ASSERT_TRUE(comes_true([&] { return disk.order().find('r') != std::string::npos; }));
    EXPECT_FALSE(pager.is_resident(*wanted.back()));
    pager.touch(wanted[37]);
    disk.open();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (i != 37) {
            EXPECT_TRUE(comes_true([&] { return pager.is_resident(*wanted[i]); })) << i;
        }
    }
    EXPECT_FALSE(pager.is_resident(*wanted[37]));
    EXPECT_EQ(pager.statistics().prefetches, 39u);
}

// More is requested than memory holds: what was read for a request stays until it is used, so nothing is read twice.
// Method: four times as many pages as fit, used in their order; every page is read once, and none when it is pinned.
TEST(PagerPlan, WhatWasReadForAHintStaysUntilItsUse) {
    constexpr std::size_t kPages = 64;
    Pager pager(options_with(kPages / 4));
    const auto other = with_role(pager, 1000);
    std::vector<std::shared_ptr<Segment>> wanted;
    for (std::uint32_t seed = 0; seed < kPages; ++seed) wanted.push_back(filled_segment(pager, 1, seed));
    for (const auto& segment : wanted) ASSERT_EQ(pager.evict(segment), 0u);
    for (const auto& segment : wanted) pager.prefetch(segment);
    for (std::uint32_t seed = 0; seed < kPages; ++seed) {
        ASSERT_TRUE(comes_true([&] {
            pager.touch(other);  // the pager looks ahead now and then while the program does something
            return pager.is_resident(*wanted[seed]);
        })) << seed;
        const PinGuard guard = pin(pager, wanted[seed], Access::read);
        pager.touch(wanted[seed]);
        EXPECT_TRUE(holds(*wanted[seed], seed));
    }
    EXPECT_EQ(pager.statistics().prefetches, kPages);
    EXPECT_EQ(pager.statistics().misses, 0u);
}

// Requests take what memory is free; only what has to be made free for them is limited. Method: more than that limit,
// in a memory that has room for all.
TEST(PagerPlan, PrefetchRequestsTakeFreeMemory) {
    constexpr std::size_t kPages = 20;
    Pager pager(options_with(kPages + 12));
    const auto other = with_role(pager, 1000);
    std::vector<std::shared_ptr<Segment>> wanted;
    for (std::uint32_t seed = 0; seed < kPages; ++seed) wanted.push_back(filled_segment(pager, 1, seed));
    for (const auto& segment : wanted) ASSERT_EQ(pager.evict(segment), 0u);
    for (const auto& segment : wanted) pager.prefetch(segment);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(comes_true([&] {
            pager.touch(other);
            return pager.is_resident(*wanted[i]);
        })) << i;
    }
}

// A request that was wrong keeps nothing in memory once a later one has come true. Method: two that nobody uses, then
// more that are used than memory holds.
TEST(PagerPlan, WrongPrefetchRequestsGiveWay) {
    constexpr std::size_t kPages = 16;
    Pager pager(options_with(kPages));
    const auto other = with_role(pager, 1000);
    std::vector<std::shared_ptr<Segment>> wanted;
    for (std::uint32_t seed = 0; seed < 2 * kPages; ++seed) wanted.push_back(filled_segment(pager, 1, seed));
    for (const auto& segment : wanted) ASSERT_EQ(pager.evict(segment), 0u);
    for (const auto& segment : wanted) pager.prefetch(segment);
    ASSERT_TRUE(comes_true([&] { return pager.is_resident(*wanted[0]) && pager.is_resident(*wanted[1]); }));
    for (std::size_t i = 2; i < wanted.size(); ++i) {
        ASSERT_TRUE(comes_true([&] {
            pager.touch(other);
            return pager.is_resident(*wanted[i]);
        })) << i;
        pager.touch(wanted[i]);
    }
    EXPECT_FALSE(pager.is_resident(*wanted[0]));
    EXPECT_FALSE(pager.is_resident(*wanted[1]));
}

// Without a recording, what is requested before each use goes first: the rest would be missed. Method: two segments
// that were used long before those that were requested, one of them read for one request at some time, and more of
// these than memory holds.
TEST(PagerPlan, WhatIsNotRequestedStaysLonger) {
    constexpr std::size_t kPages = 16;
    Pager pager(options_with(kPages));
    const auto other = with_role(pager, 1000);
    const auto unrequested = filled_segment(pager, 1, 2000);
    const auto requested_once = with_role(pager, 2001);
    pager.prefetch(requested_once);
    for (int use = 0; use < 20; ++use) pager.touch(requested_once);
    pager.touch(unrequested);
    std::vector<std::shared_ptr<Segment>> wanted;
    for (std::uint32_t seed = 0; seed < 2 * kPages; ++seed) {
        wanted.push_back(filled_segment(pager, 1, seed));
        ASSERT_EQ(pager.evict(wanted.back()), 0u);
    }
    for (const auto& segment : wanted) {
        pager.prefetch(segment);
        ASSERT_TRUE(comes_true([&] { return pager.is_resident(*segment); }));
        pager.touch(segment);
    }
    EXPECT_TRUE(pager.is_resident(*unrequested));
    EXPECT_TRUE(pager.is_resident(*requested_once));
    EXPECT_FALSE(pager.is_resident(*wanted[0]));
}

// Deferred work that nobody waits for does not fight the program for the cores, and runs once the program waits.
// Method: work due now, while the program computes, passed over by work queued later that somebody asked for; then a
// read that the disk holds back.
TEST(PagerPlan, DeferredWorkRunsWhileTheProgramWaits) {
    auto made = std::make_unique<GatedEngine>();
    GatedEngine& disk = *made;
    Pager pager(options_with(64), std::move(made));
    const auto updated = with_role(pager, 1);
    const auto requested = filled_segment(pager, 1, 3);
    const auto outstanding = filled_segment(pager, 1, 2);
    for (int step = 0; step < 2; ++step) {
        pager.touch(updated);
        pager.end_step();
    }
    ASSERT_EQ(pager.evict(outstanding), 0u);
    std::atomic<int> applied{0};
    std::atomic<int> applied_requested{0};
    pager.set_pending_work(
        [&](Segment& segment, std::size_t index, bool may_wait) {
            const bool is_requested = &segment == requested.get();
            UpdateLatch latch = pager.latch_for_update({is_requested ? &requested : &updated, 1}, index, may_wait);
            if (!latch) return false;
            latch.finish();
            ++(is_requested ? applied_requested : applied);
            return true;
        },
        [&](Segment& segment) {
            return std::vector<std::shared_ptr<Segment>>{&segment == requested.get() ? requested : updated};
        });
    ASSERT_TRUE(pager.set_pending(*updated, 0));
    pager.end_step();  // has the store look ahead: the segment is used next
    ASSERT_TRUE(comes_true([&] { return updated->page(0).load().has(PageWord::kUpdateQueued); }));
    for (int time = 1; time <= 3; ++time) {
        ASSERT_TRUE(pager.set_pending(*requested, 0));
        pager.prefetch(requested);
        ASSERT_TRUE(comes_true([&] { return applied_requested == time; }));
        EXPECT_EQ(applied, 0);
    }

    disk.shut();
    std::thread program([&] { const PinGuard guard = pin(pager, outstanding, Access::read); });
    EXPECT_TRUE(comes_true([&] { return applied == 1; }));
    disk.open();
    program.join();
    pager.clear_pending_work();
}

/// The deferred work on one segment counts how often it is applied.
void count_applied(Pager& pager, const std::shared_ptr<Segment>& updated, std::atomic<int>& applied) {
    pager.set_pending_work(
        [&pager, updated, &applied](Segment&, std::size_t index, bool may_wait) {
            UpdateLatch latch = pager.latch_for_update({&updated, 1}, index, may_wait);
            if (!latch) return false;
            latch.finish();
            ++applied;
            return true;
        },
        [updated](Segment&) { return std::vector<std::shared_ptr<Segment>>{updated}; });
}

// Work on the first pages of a segment alone, whose tensor is padded, is found like any other. Method: two of three
// pages, while the program waits for other ranks.
TEST(PagerPlan, DeferredWorkOnTheFirstPagesIsFound) {
    Pager pager(options_with(64), std::make_unique<SimEngine>(8, 1));
    const auto updated = segment_with_role(pager, 3, 1);
    for (int step = 0; step < 2; ++step) {
        pager.touch(updated);
        pager.end_step();
    }
    std::atomic<int> applied{0};
    count_applied(pager, updated, applied);
    updated->set_worked_pages(2);
    for (const std::size_t index : {0, 1}) ASSERT_TRUE(pager.set_pending(*updated, index));
    ASSERT_TRUE(updated->has_pending());
    pager.end_step();
    {
        const RankWait waiting(pager);
        EXPECT_TRUE(comes_true([&] { return applied == 2; }));
    }
    EXPECT_FALSE(updated->has_pending());
    pager.clear_pending_work();
}

// The same while it waits for other ranks: timed as such, and its cores are free meanwhile.
TEST(PagerPlan, DeferredWorkRunsWhileTheProgramWaitsForRanks) {
    Pager pager(options_with(64), std::make_unique<SimEngine>(8, 1));
    const auto updated = with_role(pager, 1);
    for (int step = 0; step < 2; ++step) {
        pager.touch(updated);
        pager.end_step();
    }
    std::atomic<int> applied{0};
    count_applied(pager, updated, applied);
    ASSERT_TRUE(pager.set_pending(*updated, 0));
    pager.end_step();
    ASSERT_TRUE(comes_true([&] { return updated->page(0).load().has(PageWord::kUpdateQueued); }));
    EXPECT_EQ(applied, 0);
    {
        const RankWait wait(pager);
        EXPECT_TRUE(comes_true([&] { return applied == 1; }));
    }
    const PagerStatistics after = pager.statistics();
    EXPECT_EQ(after.updates_in_rank_waits, 1u);
    EXPECT_GT(after.stall_ns[static_cast<std::size_t>(StallCause::network)], 0u);
    pager.clear_pending_work();
}

// What it needs is read for it then, long before it would have to be. Method: deferred work on what the step uses at
// its end, whose page is on the disk when the step begins.
TEST_P(PagerDeadlines, DeferredWorkIsReadForWhileTheProgramWaitsForRanks) {
    ASSERT_NO_FATAL_FAILURE(step());
    ASSERT_NO_FATAL_FAILURE(step());
    ASSERT_EQ(pager_.evict(late_), 0u);
    std::atomic<int> applied{0};
    count_applied(pager_, late_, applied);
    ASSERT_TRUE(pager_.set_pending(*late_, 0));
    pager_.touch(early_.front());
    ASSERT_NO_FATAL_FAILURE(await_look_ahead());
    EXPECT_EQ(pager_.statistics().prefetches, 0u);
    {
        const RankWait wait(pager_);
        EXPECT_TRUE(comes_true([&] { return applied == 1; }));
    }
    EXPECT_EQ(pager_.statistics().prefetches, 1u);
    EXPECT_EQ(pager_.statistics().updates_in_rank_waits, 1u);
    pager_.clear_pending_work();
}

}  // namespace
}  // namespace torch_offload::test
