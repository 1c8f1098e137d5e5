// What the pager's lock is not held across.
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>

#include "pager/pager.h"
#include "support/gated_engine.h"
#include "support/gated_memory.h"
#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kBudgetPages = 16;
constexpr std::size_t kResidentPages = 2;

/// A pager with a page in use, whose memory lets nothing through when a test says so.
struct Gated {
    Gated() : pager(gated_options(memory), std::make_unique<GatedEngine>()) {
        resident = filled_segment(pager, kResidentPages, 1);
    }

    static PagerOptions gated_options(GatedMemory& memory) {
        PagerOptions options = options_with(kBudgetPages);
        options.memory = &memory;
        return options;
    }

    void leave_idle(std::size_t pages) { pager.free_range(pager.allocate_range(pages * kPageBytes)); }
    void leave_free_frames(std::size_t pages) {
        const auto segment = filled_segment(pager, pages, 2);
        ASSERT_EQ(pager.evict(segment), 0u);
    }
    void make_segment(std::size_t pages) {
        const auto made = pager.create_segment(pages * kPageBytes, 4, SegmentKind::parameter);
        static_cast<void>(pin(pager, made, Access::overwrite));
    }

    GatedMemory memory;
    Pager pager;
    std::shared_ptr<Segment> resident;
    std::shared_ptr<Segment> other;
};

/// Something that has the system give or take memory.
struct Change {
    std::string name;
    GatedMemory::Call call;
    std::function<void(Gated&)> prepare;
    std::function<void(Gated&)> make;
};

void PrintTo(const Change& change, std::ostream* out) { *out << change.name; }

const std::vector<Change>& changes() {
    using Call = GatedMemory::Call;
    static const std::vector<Change> all = {
        {"NewFrame", Call::commit, [](Gated&) {}, [](Gated& gated) { gated.make_segment(1); }},
        {"NewRange", Call::commit, [](Gated&) {}, [](Gated& gated) { gated.leave_idle(2); }},
        {"IdleRangeGivenBack", Call::release, [](Gated& gated) { gated.leave_idle(12); },
         [](Gated& gated) { gated.pager.reserve_small(8 * kPageBytes); }},
        {"FreeFramesGivenBack", Call::release, [](Gated& gated) { gated.leave_free_frames(12); },
         [](Gated& gated) { gated.pager.reserve_small(8 * kPageBytes); }},
        {"RangeTakenApart", Call::move, [](Gated& gated) { gated.leave_idle(13); },
         [](Gated& gated) { gated.make_segment(1); }},
        {"RangePutTogether", Call::move, [](Gated& gated) { gated.leave_free_frames(4); },
         [](Gated& gated) { gated.leave_idle(4); }},
        {"SegmentLeavesItsRange", Call::release,
         [](Gated& gated) {
             gated.other = gated.pager.adopt_range(gated.pager.allocate_range(4 * kPageBytes), 4 * kPageBytes, 4,
                                                   {.kind = SegmentKind::gradient});
         },
         [](Gated& gated) { gated.other.reset(); }},
        {"MemoryThatCannotBeMoved", Call::release,
         [](Gated& gated) {
             gated.other = filled_segment(gated.pager, 1, 3);
             ASSERT_EQ(gated.pager.evict(gated.other), 0u);
             static_cast<void>(pin(gated.pager, gated.other, Access::read));
             gated.memory.refuse_one(Call::move);
         },
         [](Gated& gated) { gated.other.reset(); }},
    };
    return all;
}

class PagerLockOver : public ::testing::TestWithParam<Change> {};

// While the system gives or takes memory, whoever uses what is there goes on, and no more is counted than the budget
// has. Method: each call of the memory that the arena makes waits for the test; another thread touches, pins, counts
// small memory and reads the accounts.
TEST_P(PagerLockOver, IsNotHeldWhileMemoryIsMapped) {
    Gated gated;
    GetParam().prepare(gated);
    gated.memory.shut(GetParam().call);
    std::future<void> change = std::async(std::launch::async, [&] { GetParam().make(gated); });
    EXPECT_TRUE(gated.memory.comes_to_wait());
    std::future<ArenaUsage> use = std::async(std::launch::async, [&] {
        gated.pager.touch(gated.resident);
        const PinGuard guard = pin(gated.pager, gated.resident, Access::read);
        gated.pager.count_small(0);
        return gated.pager.statistics().memory;
    });
    const std::future_status status = use.wait_for(std::chrono::seconds(10));
    gated.memory.open();
    EXPECT_EQ(status, std::future_status::ready);
    EXPECT_LE(use.get().used_bytes(), kBudgetPages * kPageBytes);
    change.get();
    EXPECT_LE(gated.pager.statistics().memory.peak_bytes, kBudgetPages * kPageBytes);
    EXPECT_TRUE(holds(*gated.resident, 1));
}

// Memory that somebody else was promised and did not get is waited for. Method: the system keeps one thread waiting for
// new memory, another finds the budget used up; then the first is refused.
TEST(PagerLock, PromisedMemoryMayBecomeFree) {
    Gated gated;
    const PinGuard guard = pin(gated.pager, gated.resident, Access::read);
    gated.memory.shut(GatedMemory::Call::commit);
    std::future<void> first = std::async(std::launch::async, [&] { gated.leave_idle(10); });
    EXPECT_TRUE(gated.memory.comes_to_wait());
    std::future<void> second = std::async(std::launch::async, [&] { gated.leave_idle(10); });
    EXPECT_EQ(second.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
    gated.memory.refuse_one(GatedMemory::Call::commit);
    gated.memory.open();
    EXPECT_THROW(first.get(), OutOfTierMemory);
    EXPECT_NO_THROW(second.get());
    EXPECT_EQ(gated.pager.statistics().memory.range_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(Changes, PagerLockOver, ::testing::ValuesIn(changes()),
                         [](const auto& change) { return change.param.name; });

/// Cannot be made read-only, once it has refused to move.
class WritableMemory final : public GatedMemory {
public:
    void protect(std::span<std::byte> range, Protection protection) override {
        OFFLOAD_CHECK(protection != Protection::read, OutOfTierMemory, "refused");
        GatedMemory::protect(range, protection);
    }
};

// A page that could neither be moved nor protected again counts as changed: who writes to it now is not noticed.
// Method: both are refused for a page that is stored unchanged; what it holds afterwards has to be written once more.
TEST(PagerMemory, WhatCannotBeProtectedAgainCountsAsChanged) {
    WritableMemory memory;
    PagerOptions options = options_with(4);
    options.memory = &memory;
    Pager pager(options, std::make_unique<SimEngine>(8, 1));
    const auto segment = filled_segment(pager, 1, 1);
    pager.evict(segment);
    {
        const PinGuard guard = pin(pager, segment, Access::read);
    }
    const std::uint64_t written_bytes = total(pager.statistics().written_bytes);
    memory.refuse_one(GatedMemory::Call::move);
    EXPECT_THROW(pager.evict(segment), OutOfTierMemory);
    fill(*segment, 2);
    pager.evict(segment);
    EXPECT_EQ(total(pager.statistics().written_bytes), written_bytes + kPageBytes);
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 2));
}

}  // namespace
}  // namespace torch_offload::test
