#include "pager/in_flight_uses.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <random>
#include <vector>

#include "device/emulated_device.h"
#include "support/device_tiers.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

using std::chrono::microseconds;

/// A tier of 8 pages on an emulated device, over a host of 24.
struct Uses {
    explicit Uses(std::uint64_t seed = 0, std::int64_t longest_us = 0)
        : device({.longest_delay = microseconds(longest_us), .seed = seed}), tiers(device, 8, 24, nullptr, &device) {}

    /// A kernel that compares the segment's bytes.
    void launch_reader(const std::shared_ptr<Segment>& segment, std::uint32_t seed) {
        device.launch({segment->range()}, [this, segment = segment.get(), seed] { wrong += !holds(*segment, seed); });
    }

    std::atomic<int> wrong{0};  // kernels that found other bytes than they were promised
    EmulatedDevice device;
    DeviceTiers tiers;
};

using Segments = std::vector<std::shared_ptr<Segment>>;

/// Kernels that read and write random segments while others push them out; every read is compared. The kernels may
/// still run when this returns or throws: the caller keeps `segments`, empty before, until they have passed.
void compute_a_little(Uses& uses, Pager& pager, std::uint64_t seed, Segments& segments) {
    std::mt19937_64 random(seed);
    constexpr std::size_t kSegments = 8;
    std::vector<std::uint32_t> holding(kSegments);
    for (std::uint32_t i = 0; i < kSegments; ++i) {
        segments.push_back(filled_segment(pager, 1 + random() % 4, i));
        holding[i] = i;
    }
    for (int step = 0; step < 40; ++step) {
        const std::size_t i = random() % kSegments;
        const bool is_write = random() % 3 == 0;
        const PinGuard guard = pin(pager, segments[i], is_write ? Access::write : Access::read);
        uses.launch_reader(segments[i], holding[i]);
        if (!is_write) continue;
        holding[i] = static_cast<std::uint32_t>(random());
        uses.device.launch({segments[i]->range()},
                           [segment = segments[i].get(), value = holding[i]] { fill(*segment, value); });
    }
}

// A kernel that outlives the guard of its arguments finds them where they were, whatever its delay. Method: seeds,
// kernels over four times the memory there is.
TEST(InFlightUses, KernelsFindWhatTheyWereGiven) {
    for (const std::uint64_t seed : seeds({.usual = 20, .full = 500})) {
        Uses uses(seed, static_cast<std::int64_t>(seed % 4) * 200);
        Segments segments;
        ASSERT_NO_THROW(compute_a_little(uses, uses.tiers.top, seed, segments));
        uses.device.fence_use()->wait();
        EXPECT_EQ(uses.wrong, 0) << "seed " << seed;
        EXPECT_LE(uses.tiers.top.statistics().memory.peak_bytes, 8 * kPageBytes);
    }
}

/// A device whose kernels have always passed: marks that somebody forgot.
class UnmarkedDevice final : public Device {
public:
    explicit UnmarkedDevice(EmulatedDevice& device) : device_(device) {}
    std::unique_ptr<Stream> make_stream(LinkDirection direction) override { return device_.make_stream(direction); }
    void check_idle(std::span<const std::byte> memory) const override { device_.check_idle(memory); }
    void poison(std::span<std::byte> memory) noexcept override { device_.poison(memory); }
    std::string name() const override { return "unmarked"; }

private:
    EmulatedDevice& device_;
};

// The check of lifetimes finds a page that is moved under a kernel. Method: the same without marks.
TEST(InFlightUses, MissingMarkIsFound) {
    Uses uses(1, 2000);
    UnmarkedDevice unmarked(uses.device);
    DeviceTiers tiers(unmarked, 8, 24);
    Segments segments;
    EXPECT_THROW(compute_a_little(uses, tiers.top, 1, segments), LogicError);
    uses.device.fence_use()->wait();
}

// Who finds all memory in use by kernels waits for them instead of running out. Method: each kernel uses all there is.
TEST(InFlightUses, FullMemoryWaitsForKernels) {
    Uses uses(2, 3000);
    Segments segments;
    for (std::uint32_t i = 0; i < 3; ++i) segments.push_back(filled_segment(uses.tiers.top, 7, i));
    for (std::uint32_t step = 0; step < 12; ++step) {
        const PinGuard guard = pin(uses.tiers.top, segments[step % 3], Access::read);
        uses.launch_reader(segments[step % 3], step % 3);
    }
    uses.device.fence_use()->wait();
    EXPECT_EQ(uses.wrong, 0);
}

// A page keeps its pin until its kernel has passed, and then goes. Method: a kernel that waits for the test.
TEST(InFlightUses, PinLastsAsLongAsItsKernel) {
    Uses uses;
    std::latch gate(1);
    const auto segment = filled_segment(uses.tiers.top, 2, 7);
    uses.device.launch({segment->range()}, [&] { gate.wait(); });
    static_cast<void>(pin(uses.tiers.top, segment, Access::read));
    uses.tiers.top.prefetch(segment);
    EXPECT_EQ(segment->page(0).load().pin_count(), 1u);
    gate.count_down();
    EXPECT_EQ(uses.tiers.top.evict(segment), 0u);
    EXPECT_FALSE(uses.tiers.top.is_resident(*segment));
}

// A segment that ends while a kernel reads it lives as long. Method: the same, with the last owner gone.
TEST(InFlightUses, SegmentOutlivesItsOwnersForItsKernel) {
    Uses uses;
    std::latch gate(1);
    auto segment = filled_segment(uses.tiers.top, 2, 7);
    const std::weak_ptr<Segment> seen = segment;
    uses.device.launch({segment->range()}, [&, segment = segment.get()] {
        gate.wait();
        uses.wrong += !holds(*segment, 7);
    });
    static_cast<void>(pin(uses.tiers.top, segment, Access::read));
    segment.reset();
    EXPECT_FALSE(seen.expired());
    gate.count_down();
    uses.device.fence_use()->wait();
    static_cast<void>(filled_segment(uses.tiers.top, 7, 1));
    EXPECT_TRUE(seen.expired());
    EXPECT_EQ(uses.wrong, 0);
}

// A page that an update left in its frame is not mapped before the update's kernel has passed. Method: a page that was
// read ahead, latched, written by a slow kernel, pinned.
TEST(InFlightUses, UpdatedFrameIsMappedAfterItsKernel) {
    Uses uses(3, 3000);
    const auto segment = filled_segment(uses.tiers.top, 1, 7);
    for (std::uint32_t value = 8; value < 12; ++value) {
        uses.tiers.top.evict(segment);
        {
            const UpdateLatch latch = uses.tiers.top.latch_for_update({&segment, 1}, 0, true);
            ASSERT_EQ(segment->page(0).load().state(), PageState::busy);
            auto* words = reinterpret_cast<std::uint32_t*>(latch.bytes(0).data());
            uses.device.launch({latch.bytes(0)}, [words, value] {
                for (std::size_t i = 0; i < kPageElements; ++i) words[i] = word_of(value, i);
            });
        }
        const PinGuard guard = pin(uses.tiers.top, segment, Access::read);
        EXPECT_TRUE(holds(*segment, value));
    }
}

// Work is deferred on a page that a kernel still uses. Method: a mark while the kernel is under way.
TEST(InFlightUses, DeferringWaitsForKernels) {
    Uses uses(4, 3000);
    const auto segment = filled_segment(uses.tiers.top, 1, 7);
    {
        const PinGuard guard = pin(uses.tiers.top, segment, Access::read);
        EXPECT_FALSE(uses.tiers.top.set_pending(*segment, 0)) << "a live guard refuses";
        uses.launch_reader(segment, 7);
    }
    EXPECT_TRUE(uses.tiers.top.set_pending(*segment, 0));
    EXPECT_EQ(uses.wrong, 0);
}

// A range that is freed while a kernel uses it counts until the kernel has passed. Method: a kernel that waits for the
// test; what is in use.
TEST(InFlightUses, FreedRangeLastsAsLongAsItsKernel) {
    Uses uses;
    std::latch gate(1);
    const auto range = uses.tiers.top.allocate_range(7 * kPageBytes);
    uses.device.launch({range}, [&] { gate.wait(); });
    uses.tiers.top.free_range(range);
    EXPECT_EQ(uses.tiers.top.statistics().memory.range_bytes, 7 * kPageBytes);
    gate.count_down();
    static_cast<void>(filled_segment(uses.tiers.top, 7, 1));
    EXPECT_EQ(uses.tiers.top.statistics().memory.range_bytes, 0u);
}

}  // namespace
}  // namespace torch_offload::test
