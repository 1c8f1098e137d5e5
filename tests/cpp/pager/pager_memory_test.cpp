#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <functional>
#include <future>
#include <semaphore>
#include <utility>

#include "pager/pager.h"
#include "support/gated_engine.h"
#include "support/pager_fixture.h"
#include "support/refuse_system_call.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kQuantumBytes = kPageBytes / 8;

/// Registers all memory, and unregisters some when a test lets it.
class RegisteringEngine final : public GatedEngine {
public:
    BufferIndex register_buffer(std::span<std::byte>) override { return next_index_++; }
    void unregister_buffer(BufferIndex) override {
        began.release();
        may_end.acquire();
    }

    std::counting_semaphore<> began{0};
    std::counting_semaphore<> may_end{0};

private:
    BufferIndex next_index_ = 0;
};

/// Grants quanta until the pager refuses; returns the bytes granted.
std::size_t grant_all(Pager& pager) {
    std::size_t granted_bytes = 0;
    while (true) {
        try {
            pager.reserve_small(kQuantumBytes);
        } catch (const OutOfTierMemory&) {
            return granted_bytes;
        }
        granted_bytes += kQuantumBytes;
    }
}

// Small allocations make pages leave, frames that the I/O engine registered included, up to the last byte of the
// budget, and are refused after that rather than waited for. Method: pages that were written and read, quanta until
// refused, everything back, pages read again.
TEST(PagerMemory, SmallGrantsTakeAllThatPagesCanGive) {
    Pager pager(options_with(12));
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 5; ++i) segments.push_back(filled_segment(pager, 4, i));
    for (int round = 0; round < 4; ++round) {
        const std::size_t granted_bytes = grant_all(pager);
        EXPECT_EQ(granted_bytes, 12 * kPageBytes);
        EXPECT_EQ(pager.statistics().memory.frame_bytes, 0u);
        pager.count_small(-static_cast<std::ptrdiff_t>(granted_bytes));
        for (std::uint32_t i = 0; i < 5; ++i) {
            const PinGuard guard = pin(pager, segments[i], Access::read);
            ASSERT_TRUE(holds(*segments[i], i));
        }
    }
    EXPECT_LE(pager.statistics().memory.peak_bytes, 12 * kPageBytes);
}

// Memory that is being unregistered is on its way, not used up. Method: what is not pinned or granted is
// two registered free frames; one thread asks for so much that the store unregisters both; before that ends, another
// asks.
TEST(PagerMemory, MemoryBeingUnregisteredIsWaitedFor) {
    auto made = std::make_unique<RegisteringEngine>();
    RegisteringEngine& disk = *made;
    const PagerOptions options = options_with(6);
    Pager pager(options, std::move(made));
    const auto held = filled_segment(pager, 3, 1);
    const PinGuard guard = pin(pager, held, Access::read);
    const auto left = filled_segment(pager, 2, 2);
    ASSERT_EQ(pager.evict(left), 0u);
    pager.reserve_small(kPageBytes);
    const auto ask_for = [&pager](std::size_t size_bytes) { pager.reserve_small(size_bytes); };
    std::future<void> first = std::async(std::launch::async, ask_for, kPageBytes + kQuantumBytes);
    disk.began.acquire();
    std::future<void> second = std::async(std::launch::async, ask_for, kQuantumBytes);
    EXPECT_EQ(second.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
    disk.may_end.release(64);
    EXPECT_NO_THROW(first.get());
    EXPECT_NO_THROW(second.get());
}

// What is pinned is left alone. Method: pin half, quanta until refused, the pinned bytes are there.
TEST(PagerMemory, SmallGrantsLeavePinnedPagesAlone) {
    Pager pager(options_with(8));
    const auto held = filled_segment(pager, 4, 1);
    const auto other = filled_segment(pager, 4, 2);
    const PinGuard guard = pin(pager, held, Access::read);
    EXPECT_EQ(grant_all(pager), 4 * kPageBytes);
    EXPECT_FALSE(pager.is_resident(*other));
    EXPECT_TRUE(holds(*held, 1));
}

// A gradient that dies where it was adopted leaves its range for the next one. Method: adopt, drop, allocate again.
TEST(PagerMemory, SegmentThatDiesInPlaceLeavesItsRange) {
    Pager pager(options_with(8));
    const auto range = pager.allocate_range(4 * kPageBytes);
    const std::byte* address = range.data();
    auto gradient = pager.adopt_range(range, 4 * kPageBytes, 4, {.kind = SegmentKind::gradient});
    fill(*gradient, 3);
    gradient.reset();
    EXPECT_EQ(pager.statistics().memory.idle_range_bytes, 4 * kPageBytes);
    EXPECT_EQ(pager.statistics().memory.frame_bytes, 0u);
    const auto next = pager.allocate_range(4 * kPageBytes);
    EXPECT_EQ(next.data(), address);
    EXPECT_EQ(pager.statistics().memory.peak_bytes, 4 * kPageBytes);
    pager.free_range(next);
}

// An activation whose memory was put together from smaller pages has smaller pages; a gradient, of which an optimizer
// uses page by page, cannot be. Method: free frames of 2-byte elements become a range; adopt it as either, evict it,
// look at its bytes.
TEST(PagerMemory, ActivationsHavePagesOfTheirPieces) {
    Pager pager(options_with(8, IoEngineKind::threads));  // registers no frames
    constexpr std::size_t kHalf = kPageBytes / 2;
    const auto weight = pager.create_segment(8 * kHalf, 2, SegmentKind::parameter);
    fill(*weight, 1);
    EXPECT_EQ(pager.evict(weight), 0u);
    ASSERT_TRUE(comes_true([&] { return pager.statistics().memory.free_frame_bytes == 8 * kHalf; }));
    const auto range = pager.allocate_range(2 * kPageBytes);
    EXPECT_EQ(pager.statistics().memory.free_frame_bytes, 4 * kHalf);
    EXPECT_FALSE(pager.can_adopt(range, 4, SegmentKind::gradient));
    EXPECT_TRUE(pager.can_adopt(range, 2, SegmentKind::gradient));
    ASSERT_TRUE(pager.can_adopt(range, 4, SegmentKind::activation));
    const auto activation = pager.adopt_range(range, 2 * kPageBytes, 4, {.kind = SegmentKind::activation});
    EXPECT_EQ(activation->page_bytes(), kHalf);
    EXPECT_EQ(activation->page_count(), 4u);
    fill(*activation, 5);
    EXPECT_EQ(pager.evict(activation), 0u);
    EXPECT_TRUE(comes_true([&] { return pager.statistics().store.stored_bytes == 8 * kHalf + 2 * kPageBytes; }));
    const PinGuard guard = pin(pager, activation, Access::read);
    EXPECT_TRUE(holds(*activation, 5));
}

// One of which a page has left gives back frames. Method: the same with an eviction between. The disk's thread may be
// its last owner for a moment.
TEST(PagerMemory, SegmentThatDiesElsewhereLeavesFrames) {
    Pager pager(options_with(8));
    auto gradient =
        pager.adopt_range(pager.allocate_range(4 * kPageBytes), 4 * kPageBytes, 4, {.kind = SegmentKind::gradient});
    fill(*gradient, 3);
    EXPECT_EQ(pager.evict(gradient), 0u);
    {
        const PinGuard guard = pager.pin_pages(gradient, 1, 2, Access::read);
    }
    gradient.reset();
    EXPECT_TRUE(comes_true([&] { return pager.statistics().memory.frame_bytes == 0; }));
    EXPECT_EQ(pager.statistics().memory.idle_range_bytes, 0u);
    EXPECT_EQ(pager.statistics().store.stored_bytes, 0u);
}

/// Runs `body` in a thread whose mappings cannot be moved. False where that cannot be had: without filters of system
/// calls (a kernel without seccomp) nothing makes a move fail, so tests of it are skipped by name there.
bool without_moving(const std::function<void()>& body) {
    bool is_refused = false;
    in_own_thread([&] {
        is_refused = refuse_system_call({.number = __NR_mremap, .error = ENOMEM});
        if (is_refused) body();
    });
    return is_refused;
}

// A page that the system does not let leave its address is there as before, open to writes if it was. Method: mremap is
// refused, for a page that was written to and one that was only read; then both are used, and leave.
TEST(PagerMemory, PagesThatCannotLeaveStayAsTheyAre) {
    Pager pager(options_with(8));
    const auto written = filled_segment(pager, 1, 1);
    const auto read = filled_segment(pager, 1, 2);
    ASSERT_EQ(pager.evict(read), 0u);
    static_cast<void>(pin(pager, read, Access::read));
    const bool is_refused = without_moving([&] {
        EXPECT_THROW(pager.evict(written), OutOfTierMemory);
        EXPECT_THROW(pager.evict(read), OutOfTierMemory);
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_TRUE(holds(*written, 1));
    EXPECT_TRUE(holds(*read, 2));
    EXPECT_EQ(pager.statistics().faults, 0u);
    fill(*written, 3);
    EXPECT_EQ(pager.statistics().faults, 0u);
    fill(*read, 4);
    EXPECT_EQ(pager.statistics().faults, 1u) << "writes to what was read are still noticed";
    for (const auto& [segment, seed] : {std::pair{written, 3u}, std::pair{read, 4u}}) {
        EXPECT_EQ(pager.evict(segment), 0u);
        const PinGuard guard = pin(pager, segment, Access::read);
        EXPECT_TRUE(holds(*segment, seed));
    }
}

// A page that the system does not let come to its address can be sent away again, and its memory be read into.
// Method: mremap is refused at a pin; then it leaves, and comes back.
TEST(PagerMemory, PagesThatCannotArriveStayUsable) {
    Pager pager(options_with(8));
    const auto segment = filled_segment(pager, 1, 1);
    ASSERT_EQ(pager.evict(segment), 0u);
    const bool is_refused =
        without_moving([&] { EXPECT_THROW(static_cast<void>(pin(pager, segment, Access::read)), OutOfTierMemory); });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    ASSERT_EQ(pager.evict(segment), 0u);
    const PinGuard guard = pin(pager, segment, Access::read);  // read into the same memory
    EXPECT_TRUE(holds(*segment, 1));
}

// A page that can neither leave nor be opened where it is is lost, and every use of it says so. Method: both system
// calls are refused; a pin, an access behind it, and another segment.
TEST(PagerMemory, PagesThatCannotBeOpenedAreSaidToBeLost) {
    Pager pager(options_with(8));
    const auto lost = filled_segment(pager, 1, 1);
    const bool is_refused = without_moving([&] {
        const RefusedCall opening{__NR_mprotect, ENOMEM, 2, PROT_READ, PROT_READ};
        ASSERT_TRUE(refuse_system_call(opening));
        EXPECT_THROW(pager.evict(lost), OutOfTierMemory);
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_THROW(static_cast<void>(pin(pager, lost, Access::read)), CorruptPage);
    EXPECT_EQ(lost->range()[0], std::byte{0xFF});
    EXPECT_EQ(pager.statistics().memory.frame_bytes, 0u);
    const auto other = pager.create_segment(6 * kPageBytes, 4, SegmentKind::parameter);
    EXPECT_THROW(static_cast<void>(pin(pager, other, Access::overwrite)), CorruptPage) << "for the access";
    const PinGuard guard = pin(pager, other, Access::overwrite);
    fill(*other, 2);
    EXPECT_TRUE(holds(*other, 2));
}

}  // namespace
}  // namespace torch_offload::test
