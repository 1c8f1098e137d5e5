// Training in small, every byte of which is known, over a device, a host and a disk.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "device/emulated_device.h"
#include "support/seeds.h"
#include "support/small_training.h"
#include "support/three_tiers.h"

namespace torch_offload::test {
namespace {

// Whatever the delays and capacities and wherever updates run, every read gives what was written, no memory is used
// before its copy has passed, and no budget is exceeded. Method: seeds.
TEST(SmallTraining, RandomDelaysAndCapacitiesChangeNothing) {
    for (const std::uint64_t seed : seeds({.usual = 40, .full = 10'000})) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        EmulatedDevice device({.longest_delay = std::chrono::microseconds(random() % 4 * 50), .seed = seed});
        const std::size_t device_pages = 8 + random() % 8;
        const std::size_t host_pages = 16 + random() % 12;
        const UpdatesOn updates_on = random() % 2 == 0 ? UpdatesOn::device : UpdatesOn::host;
        ThreeTiers tiers(device, device_pages, host_pages, updates_on);
        SmallTraining training(tiers.top, seed, 3 + random() % 6, 3);
        for (int step = 0; step < 3; ++step) ASSERT_EQ(training.step(), 0u) << "step " << step;
        ASSERT_EQ(training.differences(), 0u);
        ASSERT_LE(tiers.top.statistics().memory.peak_bytes, device_pages * kPageBytes);
        ASSERT_LE(tiers.host.statistics().memory.peak_bytes, host_pages * kPageBytes);
    }
}

// Updates on the host bring no state to the device, and gradients down once. Method: bytes by kind on each link.
TEST(SmallTraining, StatesOfUpdatesOnTheHostStayThere) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 12, 40, UpdatesOn::host);
    SmallTraining training(tiers.top, 7, 8, 3);
    for (int step = 0; step < 4; ++step) ASSERT_EQ(training.step(), 0u);
    const PagerStatistics before_reading = tiers.top.statistics();
    const auto of_kind = [](SegmentKind kind) { return static_cast<std::size_t>(kind); };
    EXPECT_EQ(before_reading.read_bytes[of_kind(SegmentKind::state)], 0u);
    EXPECT_EQ(before_reading.written_bytes[of_kind(SegmentKind::state)], 0u);
    EXPECT_EQ(before_reading.read_bytes[of_kind(SegmentKind::gradient)], 0u);
    EXPECT_GT(before_reading.written_bytes[of_kind(SegmentKind::gradient)], 0u);
    EXPECT_GT(before_reading.read_bytes[of_kind(SegmentKind::parameter)], 0u);
    EXPECT_EQ(training.differences(), 0u);
}

// A page whose address somebody holds is updated where it lies. Method: the weight of a layer pinned across a step.
TEST(SmallTraining, PageHeldAtItsAddressIsUpdatedThere) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 16, 40, UpdatesOn::host);
    const auto held = filled_segment(tiers.top, 1, 1);
    const auto other = filled_segment(tiers.top, 1, 2);
    const PinGuard guard = pin(tiers.top, held, Access::read);
    ASSERT_FALSE(tiers.top.set_pending(*held, 0));
    ASSERT_TRUE(tiers.top.set_pending(*other, 0));
    const std::vector<std::shared_ptr<Segment>> segments{held, other};
    {
        UpdateLatch latch = tiers.top.latch_for_update(segments, 0, true);
        ASSERT_TRUE(latch);
        EXPECT_EQ(latch.bytes(0).data(), held->range().data());
        words_of(latch.bytes(0))[0] = 77;
        latch.finish();
    }
    EXPECT_EQ(words_of(held->range())[0], 77u);
}

}  // namespace
}  // namespace torch_offload::test
