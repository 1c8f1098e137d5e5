// The pager of a GPU's memory, over the fake driver: what a GPU itself decides is not tested here.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "support/device_tiers.h"
#include "support/fake_gpu.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

using std::chrono::microseconds;

constexpr std::size_t kDevicePages = 8;
constexpr std::size_t kHostPages = 24;

struct GpuTiers {
    explicit GpuTiers(const FakeCudaOptions& options = {})
        : gpu(options),
          tiers(gpu.device, kDevicePages, kHostPages, &gpu.memory, nullptr, &gpu.host_memory),
          top(tiers.top) {}

    FakeGpu gpu;
    DeviceTiers tiers;
    Pager& top;
};

std::shared_ptr<Segment> filled_bytes(Pager& pager, std::size_t size_bytes, std::uint32_t seed) {
    auto segment = pager.create_segment(size_bytes, 4, SegmentKind::parameter);
    segment->label = concat("segment ", seed);
    const PinGuard guard = pin(pager, segment, Access::overwrite);
    fill(*segment, seed);
    return segment;
}

/// Kernels that read and write random segments of odd sizes; every read is compared. How many were wrong.
int compute_a_little(GpuTiers& tiers, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    constexpr std::size_t kSegments = 12;
    std::atomic<int> wrong{0};
    std::vector<std::shared_ptr<Segment>> segments;
    std::vector<std::uint32_t> holding(kSegments);
    for (std::uint32_t i = 0; i < kSegments; ++i) {
        segments.push_back(filled_bytes(tiers.top, 4 * (1 + random() % (kPageElements * 4)), i));
        holding[i] = i;
    }
    for (int step = 0; step < 40; ++step) {
        const std::size_t i = random() % kSegments;
        const bool is_write = random() % 3 == 0;
        const PinGuard guard = pin(tiers.top, segments[i], is_write ? Access::write : Access::read);
        Segment* const segment = segments[i].get();
        tiers.gpu.driver.launch({segment->range()},
                                [&wrong, segment, value = holding[i]] { wrong += !holds(*segment, value); });
        if (is_write) {
            holding[i] = static_cast<std::uint32_t>(random());
            tiers.gpu.driver.launch({segment->range()}, [segment, value = holding[i]] { fill(*segment, value); });
        }
        if (random() % 4 == 0) tiers.top.prefetch(segments[random() % kSegments]);
    }
    tiers.gpu.device.fence_use()->wait();
    return wrong;
}

// What a GPU has no room for lies on the host and on the SSD, and comes back the same, under kernels that are still
// running; the budget holds in the driver's own count. Method: seeds, delays in every stream, four times the memory.
TEST(CudaPager, KernelsFindTheirBytes) {
    for (const std::uint64_t seed : seeds({.usual = 16, .full = 400})) {
        GpuTiers tiers({.longest_delay = microseconds(seed % 4 * 100), .seed = seed});
        int wrong = -1;
        ASSERT_NO_THROW(wrong = compute_a_little(tiers, seed)) << "seed " << seed;
        EXPECT_EQ(wrong, 0) << "seed " << seed;
        EXPECT_LE(tiers.top.statistics().memory.peak_bytes, kDevicePages * kPageBytes);
        EXPECT_LE(tiers.gpu.driver.peak_created_bytes(), kDevicePages * kPageBytes);
        EXPECT_GT(total(tiers.top.statistics().written_bytes), 0u);
        EXPECT_GT(total(tiers.top.statistics().read_bytes), 0u);
    }
}

// Pages come and go while somebody else captures into a graph, whose capture stays valid, and no device is lost.
// Method: captures by another thread and by the one that uses the pages, on a stream of their own, in the modes that
// there are.
TEST(CudaPager, CapturesElsewhereStayValid) {
    for (const CuCaptureMode mode : {CuCaptureMode::global, CuCaptureMode::of_thread, CuCaptureMode::relaxed}) {
        for (const bool is_of_another_thread : {true, false}) {
            GpuTiers tiers({.longest_delay = microseconds(50), .seed = 1});
            FakeCuda& driver = tiers.gpu.driver;
            const CuStream captured = driver.blocking_stream();
            const auto begin = [&] { driver.begin_capture(captured, mode); };
            is_of_another_thread ? std::thread(begin).join() : begin();
            EXPECT_EQ(compute_a_little(tiers, 1), 0);
            EXPECT_TRUE(driver.end_capture(captured)) << static_cast<int>(mode) << is_of_another_thread;
            EXPECT_FALSE(tiers.gpu.context.is_lost());
            for (const char* const symbol : {"cuEventQuery", "cuEventSynchronize", "cuMemHostRegister_v2"}) {
                EXPECT_GT(driver.call_count(symbol), 0u) << symbol << " could have broken it";
            }
        }
    }
}

// A guard that ends while its stream is captured keeps its pages until the capture has ended: who needs their memory is
// told why there is none. Method: most of the device pinned, a capture, the guard's end; then the end of the capture.
TEST(CudaPager, PagesOfAStreamThatIsCapturedStay) {
    GpuTiers tiers;
    const auto used = filled_segment(tiers.top, kDevicePages - 1, 1);
    const auto other = tiers.top.create_segment(2 * kPageBytes, 4, SegmentKind::state);
    {
        const PinGuard guard = pin(tiers.top, used, Access::read);
        tiers.gpu.driver.begin_capture(tiers.gpu.compute_stream);
    }
    EXPECT_THROW(static_cast<void>(pin(tiers.top, other, Access::read)), InvalidArgument);
    EXPECT_TRUE(tiers.gpu.driver.is_mapped(used->range()));
    EXPECT_TRUE(tiers.gpu.driver.end_capture(tiers.gpu.compute_stream));
    EXPECT_FALSE(tiers.gpu.context.is_lost());
    static_cast<void>(pin(tiers.top, other, Access::read));
    const PinGuard guard = pin(tiers.top, used, Access::read);
    EXPECT_TRUE(holds(*used, 1));
}

// A pager that ends while the stream is captured ends, with all that it had. Method: the fake says what is left behind.
TEST(CudaPager, EndsWhileItsStreamIsCaptured) {
    FakeGpu gpu;
    {
        DeviceTiers tiers(gpu.device, kDevicePages, kHostPages, &gpu.memory);
        const PinGuard guard = pin(tiers.top, filled_segment(tiers.top, 3, 1), Access::read);
        gpu.driver.begin_capture(gpu.compute_stream);
    }
    EXPECT_FALSE(gpu.context.is_lost());
    EXPECT_TRUE(gpu.driver.end_capture(gpu.compute_stream));
}

// Pages that were never written are zeros, though new memory is not. Method: read all of one.
TEST(CudaPager, NewPagesAreZeros) {
    GpuTiers tiers;
    const auto segment = tiers.top.create_segment(3 * kPageBytes - 4, 4, SegmentKind::state);
    const PinGuard guard = pin(tiers.top, segment, Access::read);
    EXPECT_TRUE(std::ranges::all_of(segment->range(), [](std::byte byte) { return byte == std::byte{0}; }));
}

/// A page in its frame, and a kernel that has yet to write `value` there.
std::shared_ptr<Segment> segment_under_update(GpuTiers& tiers, std::uint32_t value) {
    auto segment = filled_segment(tiers.top, 1, 7);
    tiers.top.evict(segment);
    tiers.top.prefetch(segment);
    EXPECT_TRUE(comes_true([&] { return segment->page(0).load().state() == PageState::loaded; }));
    tiers.gpu.driver.hold();
    const UpdateLatch latch = tiers.top.latch_for_update({&segment, 1}, 0, true);
    auto* words = reinterpret_cast<std::uint32_t*>(latch.bytes(0).data());
    tiers.gpu.driver.launch({latch.bytes(0)}, [words, value] {
        for (std::size_t i = 0; i < kPageElements; ++i) words[i] = word_of(value, i);
    });
    return segment;
}

// Nobody waits for an update's kernel to use what it leaves: kernels are in order, those of other streams as well.
// Method: a page that is pinned while its update is held, by kernels of the update's stream or of another.
TEST(CudaPager, UpdatedPagesAreUsedInOrderWithoutAWait) {
    for (const bool is_other_stream : {false, true}) {
        for (const bool is_mapped_before : {false, true}) {
            GpuTiers tiers({.longest_delay = microseconds(1000), .seed = 4});
            const auto segment = segment_under_update(tiers, 8);
            if (is_mapped_before) static_cast<void>(pin(tiers.top, segment, Access::read));
            const CuStream other = tiers.gpu.driver.blocking_stream();
            if (is_other_stream) tiers.gpu.compute_stream = other;
            std::atomic<bool> was_updated{false};
            {
                const PinGuard guard = pin(tiers.top, segment, Access::read);
                tiers.gpu.driver.launch_in(tiers.gpu.compute_stream, {segment->range()},
                                           [&] { was_updated = holds(*segment, 8); });
            }
            tiers.gpu.driver.let_go();
            tiers.gpu.device.fence_use()->wait();
            EXPECT_TRUE(was_updated) << is_other_stream << is_mapped_before;
            EXPECT_EQ(tiers.gpu.driver.call_count("cuStreamWaitEvent") > 0, is_other_stream);
        }
    }
}

// Updates follow each other as they were given, whatever their streams. Method: the second adds to what the first,
// which is held, leaves.
TEST(CudaPager, UpdatesOfDifferentStreamsAreInOrder) {
    GpuTiers tiers({.longest_delay = microseconds(1000), .seed = 5});
    const auto segment = segment_under_update(tiers, 8);
    tiers.gpu.compute_stream = tiers.gpu.driver.blocking_stream();
    std::atomic<bool> was_updated{false};
    {
        const UpdateLatch latch = tiers.top.latch_for_update({&segment, 1}, 0, true);
        auto* words = reinterpret_cast<std::uint32_t*>(latch.bytes(0).data());
        tiers.gpu.driver.launch_in(tiers.gpu.compute_stream, {latch.bytes(0)},
                                   [&, words] { was_updated = words[1] == word_of(8, 1); });
    }
    tiers.gpu.driver.let_go();
    tiers.gpu.device.fence_use()->wait();
    EXPECT_TRUE(was_updated);
}

// A stream that is behind keeps its own pages, not those of others. Method: a kernel that waits for the test, then one
// of another stream that has run, whose pages can go.
TEST(CudaPager, SlowStreamKeepsItsOwnPagesOnly) {
    GpuTiers tiers;
    const auto slow = filled_segment(tiers.top, 2, 1);
    const auto fast = filled_segment(tiers.top, 2, 2);
    tiers.gpu.device.fence_use()->wait();
    std::atomic<bool> may_end{false};
    {
        const PinGuard guard = pin(tiers.top, slow, Access::read);
        tiers.gpu.driver.launch({slow->range()}, [&] {
            while (!may_end) std::this_thread::yield();
        });
    }
    tiers.gpu.compute_stream = tiers.gpu.driver.blocking_stream();
    {
        const PinGuard guard = pin(tiers.top, fast, Access::read);
        tiers.gpu.driver.launch_in(tiers.gpu.compute_stream, {fast->range()}, [] {});
    }
    tiers.gpu.device.fence_use()->wait();
    const auto other = filled_segment(tiers.top, 1, 3);  // who takes memory looks for what has passed
    const std::uint32_t pins = fast->page(0).load().pin_count();
    EXPECT_EQ(pins, 0u);
    if (pins == 0) {
        EXPECT_EQ(tiers.top.evict(fast), 0u);  // else it would wait for the other stream
    }
    EXPECT_EQ(slow->page(0).load().pin_count(), 1u);
    may_end = true;
}

// A GPU's updates are queued as soon as their pages are there: they take no core from the program. Method: deferred
// work on pages that come back, and a program that waits for nothing.
TEST(CudaPager, UpdatesDoNotWaitForTheProgramToWait) {
    GpuTiers tiers;
    std::atomic<int> resolved{0};
    const auto segment = segment_with_role(tiers.top, 2, 7);
    tiers.top.set_pending_work(
        [&](Segment& of, std::size_t index, bool may_wait) {
            const std::shared_ptr<Segment> latched = of.shared_from_this();
            UpdateLatch latch = tiers.top.latch_for_update({&latched, 1}, index, may_wait);
            if (latch) latch.finish();
            resolved += latch ? 1 : 0;
            return static_cast<bool>(latch);
        },
        [](Segment& of) { return std::vector<std::shared_ptr<Segment>>{of.shared_from_this()}; });
    for (int step = 0; step < 2; ++step) {
        tiers.top.touch(segment);
        tiers.top.end_step();
    }
    for (std::size_t i = 0; i < segment->page_count(); ++i) ASSERT_TRUE(tiers.top.set_pending(*segment, i));
    tiers.top.end_step();  // has the store look ahead: the segment is used next
    EXPECT_TRUE(comes_true([&] { return resolved == 2; }));
    tiers.top.clear_pending_work();
}

// Nothing is left on the device when the segments end. Method: what the driver has created once the pager is gone is
// looked at by the fake; here, that ended segments can be replaced for ever.
TEST(CudaPager, EndedSegmentsLeaveRoom) {
    GpuTiers tiers;
    for (std::uint32_t i = 0; i < 20; ++i) {
        const auto segment = filled_segment(tiers.top, 7, i);
        EXPECT_EQ(tiers.top.evict(segment), 0u);
    }
    EXPECT_EQ(tiers.top.statistics().memory.frame_bytes, 0u);
    EXPECT_LE(tiers.gpu.driver.peak_created_bytes(), kDevicePages * kPageBytes);
}

// Ranges for temporaries come from the same memory as pages, which each take for the other. Method: one after the
// other.
TEST(CudaPager, RangesAndPagesShareTheMemory) {
    GpuTiers tiers;
    const auto segment = filled_segment(tiers.top, 7, 1);
    for (int round = 0; round < 3; ++round) {
        const auto range = tiers.top.allocate_range(6 * kPageBytes - 100);
        EXPECT_EQ(range.size() % tiers.gpu.memory.granularity_bytes(), 0u);
        std::ranges::fill(range, std::byte{0x3C});
        tiers.top.free_range(range);
        const PinGuard guard = pin(tiers.top, segment, Access::read);
        EXPECT_TRUE(holds(*segment, 1));
    }
    EXPECT_LE(tiers.gpu.driver.peak_created_bytes(), kDevicePages * kPageBytes);
}

// Pages that are not made of granules are refused with the size that works. Method: granules of two pages.
TEST(CudaPager, PagesAreMadeOfGranules) {
    GpuTiers tiers({.granule_bytes = 2 * kPageBytes});
    try {
        static_cast<void>(tiers.top.create_segment(kPageBytes, 4, SegmentKind::parameter));
        FAIL() << "pages of half a granule";
    } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find("page_elements of 8192 works"), std::string::npos) << error.what();
    }
}

// A device whose memory others have is a lack of memory, said to who asked, and nothing is lost. Method: half of what
// the budget promises.
TEST(CudaPager, MemoryThatOthersHaveIsSaid) {
    GpuTiers tiers({.memory_bytes = 4 * kPageBytes});
    const auto first = filled_segment(tiers.top, 3, 1);
    EXPECT_THROW(filled_segment(tiers.top, 3, 2), OutOfTierMemory);
    EXPECT_FALSE(tiers.gpu.context.is_lost());
    const PinGuard guard = pin(tiers.top, first, Access::read);
    EXPECT_TRUE(holds(*first, 1));
}

/// Segments before the last hold their number; the last is evicted, to be zeros again. How often it took.
int attempts_to_use(Pager& pager, const std::shared_ptr<Segment>& segment, std::uint32_t number) {
    for (int attempts = 1; attempts < 10; ++attempts) {
        try {
            if (number == 6) pager.evict(segment);
            const PinGuard guard = pin(pager, segment, Access::read);
            EXPECT_TRUE(number == 6 || holds(*segment, number));
            return attempts;
        } catch (const LogicError&) {
            continue;
        }
    }
    return 10;
}

// A call of the driver that fails while pages move is raised, and the same access succeeds afterwards. Method: each
// call that a page's way takes fails once, at several places.
TEST(CudaPager, FailedMovesLoseNothing) {
    for (const char* const symbol : {"cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemsetD8Async"}) {
        GpuTiers tiers;
        std::vector<std::shared_ptr<Segment>> segments;
        for (std::uint32_t i = 0; i < 6; ++i) segments.push_back(filled_segment(tiers.top, 3, i));
        segments.push_back(tiers.top.create_segment(kPageBytes, 4, SegmentKind::state));  // of zeros
        for (std::uint32_t i = 0; i < 42; ++i) {
            if (i % 5 == 0) tiers.gpu.driver.fail(symbol, CuResult::not_permitted, i % 3);
            ASSERT_LT(attempts_to_use(tiers.top, segments[i % 7], i % 7), 10) << symbol;
        }
        EXPECT_FALSE(tiers.gpu.context.is_lost());
    }
}

// A copy that cannot be waited for is still under way: its memory is no other page's before it has passed. Method: all
// of the device's memory in use but for one page, whose copy is held while the wait for it is refused; another page
// that needs that memory.
TEST(CudaPager, MemoryOfACopyThatCannotBeWaitedForIsNotReused) {
    GpuTiers tiers;
    FakeCuda& driver = tiers.gpu.driver;
    const auto away = filled_segment(tiers.top, 1, 1);
    const auto other = tiers.top.create_segment(kPageBytes, 4, SegmentKind::state);
    ASSERT_EQ(tiers.top.evict(away), 0u);
    const auto most =
        filled_segment(tiers.top, kDevicePages - 2, 2);  // of the rest half a page is for small allocations
    const PinGuard guard = pin(tiers.top, most, Access::read);
    const std::size_t waits = driver.call_count("cuEventSynchronize");
    driver.hold();
    driver.fail("cuEventSynchronize", CuResult::not_permitted);
    std::thread reader([&] { EXPECT_NO_THROW(static_cast<void>(pin(tiers.top, away, Access::read))); });
    while (driver.call_count("cuEventSynchronize") == waits) std::this_thread::yield();
    std::atomic<bool> is_written{false};
    std::thread writer([&] {
        const PinGuard own = pin(tiers.top, other, Access::overwrite);
        fill(*other, 3);
        is_written = true;
    });
    while (!is_written && driver.call_count("cuEventSynchronize") < waits + 2) std::this_thread::yield();
    EXPECT_FALSE(is_written);
    driver.let_go();
    reader.join();
    writer.join();
    for (const auto& [segment, seed] : {std::pair{away, 1u}, std::pair{other, 3u}}) {
        const PinGuard own = pin(tiers.top, segment, Access::read);
        EXPECT_TRUE(holds(*segment, seed)) << seed;
    }
}

// What lies below unchanged is given back when the device is lost while the page moves. Method: the unmapping loses it.
TEST(CudaPager, WhatIsBelowOutlivesADeviceLostWhileItMoves) {
    GpuTiers tiers;
    const auto segment = filled_segment(tiers.top, 1, 1);
    tiers.top.evict(segment);
    {
        const PinGuard guard = pin(tiers.top, segment, Access::read);
    }
    tiers.gpu.driver.lose_at("cuMemUnmap", CuResult::launch_failed, 0);
    EXPECT_THROW(tiers.top.evict(segment), TierIoError);
    EXPECT_TRUE(tiers.gpu.context.is_lost());
    std::vector<std::uint32_t> words(kPageElements);
    ASSERT_TRUE(tiers.top.salvage(*segment, 0, std::as_writable_bytes(std::span(words))));
    for (std::size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], word_of(1, i)) << i;
}

// A device that is lost while pages move is said to every access, holds nobody up, and ends quietly. Method: one copy
// of many fails, in both directions.
TEST(CudaPager, LostDeviceIsSaidAndHoldsNobodyUp) {
    for (const std::size_t skip : {0u, 5u, 20u, 41u}) {
        GpuTiers tiers({.longest_delay = microseconds(50), .seed = skip});
        std::vector<std::shared_ptr<Segment>> segments;
        tiers.gpu.driver.fail_copy(CuResult::launch_failed, skip);
        const auto use_all = [&] {
            for (std::uint32_t i = 0; i < 8; ++i) segments.push_back(filled_segment(tiers.top, 3, i));
            for (std::uint32_t i = 0; i < 24; ++i) {
                const PinGuard guard = pin(tiers.top, segments[i % 8], Access::read);
                tiers.gpu.driver.launch({segments[i % 8]->range()}, [] {});
            }
        };
        EXPECT_THROW(use_all(), TierIoError) << skip;
        EXPECT_TRUE(tiers.gpu.context.is_lost());
        for (const auto& segment : segments) {
            try {
                static_cast<void>(pin(tiers.top, segment, Access::read));
                EXPECT_TRUE(tiers.top.is_resident(*segment));  // needs no call of the driver
            } catch (const OffloadError&) {
            }
        }
        EXPECT_THROW(filled_segment(tiers.top, 3, 9), OffloadError);
    }
}

// Of a lost device all that is left which had gone below and was not changed since, and nothing older passes for it.
// Method: segments that were sent away, that came back to be read, that were changed, that never left, without bytes.
TEST(CudaPager, WhatIsBelowSurvivesTheDevice) {
    GpuTiers tiers;
    const auto away = filled_segment(tiers.top, 1, 1);
    const auto read = filled_segment(tiers.top, 1, 2);
    const auto changed = filled_segment(tiers.top, 1, 3);
    const auto untouched = tiers.top.create_segment(kPageBytes, 4, SegmentKind::state);
    for (const auto& segment : {away, read, changed}) ASSERT_EQ(tiers.top.evict(segment), 0u);
    static_cast<void>(pin(tiers.top, read, Access::read));
    static_cast<void>(pin(tiers.top, changed, Access::write));
    const auto never_left = filled_segment(tiers.top, 1, 4);
    tiers.gpu.driver.fail_copy(CuResult::launch_failed);
    EXPECT_THROW(static_cast<void>(pin(tiers.top, away, Access::read)), TierIoError);

    std::vector<std::uint32_t> bytes(kPageElements);
    const auto salvage = [&](const std::shared_ptr<Segment>& segment) {
        std::ranges::fill(bytes, 7u);
        return tiers.top.salvage(*segment, 0, std::as_writable_bytes(std::span(bytes)));
    };
    for (const auto& [segment, seed] : {std::pair{away, 1u}, std::pair{read, 2u}}) {
        ASSERT_TRUE(salvage(segment));
        for (std::size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], word_of(seed, i));
    }
    ASSERT_TRUE(salvage(untouched));
    EXPECT_EQ(std::ranges::count(bytes, 0u), std::ssize(bytes));
    for (const auto& segment : {changed, never_left}) {
        EXPECT_FALSE(salvage(segment));
        EXPECT_EQ(std::ranges::count(bytes, 7u), std::ssize(bytes)) << "nothing was copied";
    }
}

// A device that is lost between two pages of a pin that overwrites: the first is undone as any other. Method: its
// access is set, that of the second loses the device; the table of changes is looked at when all tests have ended.
TEST(CudaPager, DeviceLostWhileAPinMapsLeavesNoPageMapped) {
    GpuTiers tiers;
    const auto segment = tiers.top.create_segment(3 * kPageBytes, 4, SegmentKind::parameter);
    static_cast<void>(filled_segment(tiers.top, 3, 1));  // frames are there
    tiers.gpu.driver.lose_at("cuMemMap", CuResult::launch_failed, 1);
    EXPECT_THROW(static_cast<void>(pin(tiers.top, segment, Access::overwrite)), TierIoError);
    EXPECT_TRUE(tiers.gpu.context.is_lost());
    EXPECT_FALSE(tiers.top.is_resident(*segment));
}

}  // namespace
}  // namespace torch_offload::test
