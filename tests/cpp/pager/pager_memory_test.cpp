#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <functional>
#include <future>
#include <semaphore>
#include <utility>

#include "device/address_arena.h"
#include "device/address_space.h"
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

// A range that was put together from smaller pages becomes pages of its own size, whose memory is several mappings.
// Method: free frames of 2-byte elements become a range; adopt it, evict it, look at its bytes.
TEST(PagerMemory, RangesOfSmallerPagesBecomePages) {
    Pager pager(options_with(8, IoEngineKind::threads));  // registers no frames
    constexpr std::size_t kHalf = kPageBytes / 2;
    const auto weight = pager.create_segment(8 * kHalf, 2, SegmentKind::parameter);
    fill(*weight, 1);
    EXPECT_EQ(pager.evict(weight), 0u);
    ASSERT_TRUE(comes_true([&] { return pager.statistics().memory.free_frame_bytes == 8 * kHalf; }));
    const auto range = pager.allocate_range(2 * kPageBytes);
    EXPECT_EQ(pager.statistics().memory.free_frame_bytes, 4 * kHalf);
    ASSERT_TRUE(pager.can_adopt_ranges());
    const auto activation = pager.adopt_range(range, 2 * kPageBytes, 4, {.kind = SegmentKind::activation});
    EXPECT_EQ(activation->page_count(), 2u);
    fill(*activation, 5);
    EXPECT_EQ(pager.evict(activation), 0u);
    EXPECT_TRUE(comes_true([&] { return pager.statistics().store.stored_bytes == 8 * kHalf + 2 * kPageBytes; }));
    const PinGuard guard = pin(pager, activation, Access::read);
    EXPECT_TRUE(holds(*activation, 5));
}

// Tensors that share a block leave and come back by themselves, even where one begins in the granule of addresses in
// which another ends. Method: three ranges of a granule and a sector become segments; evict them, touch one after the
// other without a pin, look at all bytes, and see the block whole again at the end.
TEST(PagerMemory, SegmentsShareABlock) {
    constexpr std::size_t kRangeBytes = kAddressGranuleBytes + kSectorBytes;
    Pager pager(options_with(4096));  // a block has room for three
    std::vector<std::span<std::byte>> ranges;
    std::vector<std::shared_ptr<Segment>> segments;
    for (int i = 0; i < 3; ++i) ranges.push_back(pager.allocate_range(kRangeBytes));
    EXPECT_EQ(ranges[1].data(), ranges[0].data() + kRangeBytes);
    EXPECT_EQ(ranges[2].data(), ranges[1].data() + kRangeBytes);
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        segments.push_back(pager.adopt_range(ranges[i], kRangeBytes, 4, {.kind = SegmentKind::activation}));
        fill(*segments.back(), static_cast<int>(i));
    }
    for (const auto& segment : segments) EXPECT_EQ(pager.evict(segment), 0u);
    ASSERT_TRUE(comes_true([&] { return pager.statistics().memory.frame_bytes == 0; }));
    const std::uint64_t faults = AddressSpace::process().fault_count();
    for (std::size_t i = 0; i < segments.size(); ++i) EXPECT_TRUE(holds(*segments[i], static_cast<int>(i))) << i;
    EXPECT_GE(AddressSpace::process().fault_count(), faults + 3);
    segments.clear();
    EXPECT_TRUE(comes_true([&] {
        const ArenaUsage usage = pager.statistics().memory;
        return usage.frame_bytes == 0 && usage.range_bytes == 0;
    }));
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

// And its addresses, which serve others. Method: the only range of its block dies elsewhere; sooner or later a new
// segment of its size lies there.
TEST(PagerMemory, SegmentThatDiesElsewhereLeavesItsAddresses) {
    Pager pager(options_with(16));
    auto gradient =
        pager.adopt_range(pager.allocate_range(8 * kPageBytes), 8 * kPageBytes, 4, {.kind = SegmentKind::gradient});
    const std::byte* const address = gradient->range().data();
    fill(*gradient, 3);
    EXPECT_EQ(pager.evict(gradient), 0u);
    gradient.reset();
    std::vector<std::shared_ptr<Segment>> others;  // each has addresses of its own
    EXPECT_TRUE(comes_true([&] {
        others.push_back(pager.create_segment(8 * kPageBytes, 4, SegmentKind::gradient));
        return others.back()->range().data() == address;
    }));
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
