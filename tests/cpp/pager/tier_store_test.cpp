#include "pager/tier_store.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <vector>

#include "device/emulated_device.h"
#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

using std::chrono::microseconds;

/// A device's pager over a host's over a simulated disk.
struct ThreeTiers {
    ThreeTiers(Device& device, std::size_t device_pages, std::size_t host_pages)
        : engine(new SimEngine(8, 1, {})),
          host(with_device(host_pages, device), std::unique_ptr<IoEngine>(engine)),
          top(with_device(device_pages, device), std::make_unique<TierStore>(host, device)) {}

    static PagerOptions with_device(std::size_t budget_pages, Device& device) {
        PagerOptions options = options_with(budget_pages);
        options.device = &device;
        return options;
    }

    SimEngine* engine;  // the host pager's
    Pager host;
    Pager top;
};

// What the device has no room for lies on the host, what the host has no room for on the SSD, and comes back the same.
// Method: 60 pages over a device of 8 and a host of 24, read in order, twice; bytes that moved on each link.
TEST(TierStore, PagesGoThroughBothTiers) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 15; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    for (int round = 0; round < 2; ++round) {
        for (std::uint32_t i = 0; i < 15; ++i) {
            const PinGuard guard = pin(tiers.top, segments[i], Access::read);
            ASSERT_TRUE(holds(*segments[i], i));
        }
    }
    const PagerStatistics on_device = tiers.top.statistics();
    const PagerStatistics on_host = tiers.host.statistics();
    EXPECT_GE(total(on_device.written_bytes), 52 * kPageBytes);
    EXPECT_GE(total(on_device.read_bytes), 2 * 52 * kPageBytes);
    EXPECT_GE(total(on_host.written_bytes), 28 * kPageBytes);
    EXPECT_GE(total(on_host.read_bytes), 2 * 28 * kPageBytes);
    EXPECT_LE(on_device.memory.peak_bytes, 8 * kPageBytes);
    EXPECT_LE(on_host.memory.peak_bytes, 24 * kPageBytes);
    EXPECT_EQ(on_device.store.engine, "emulated");
}

// What is evicted goes through the host to the SSD, and a segment that ends leaves nothing below. Method: two that were
// evicted, dropped.
TEST(TierStore, SegmentThatEndsLeavesNothingBelow) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    for (std::uint32_t i = 0; i < 2; ++i) {
        const auto segment = filled_segment(tiers.top, 4, i);
        EXPECT_EQ(tiers.top.evict(segment), 0u);
        EXPECT_EQ(tiers.host.statistics().memory.frame_bytes, 0u);
        EXPECT_EQ(tiers.host.statistics().store.stored_bytes, 4 * kPageBytes);
    }
    EXPECT_EQ(tiers.host.statistics().memory.frame_bytes, 0u);
    EXPECT_EQ(tiers.host.statistics().store.stored_bytes, 0u);
}

// A read that fails on the SSD is a typed error above, at every access; another page goes on. Method: scripted EIO.
TEST(TierStore, FailedReadBelowIsRaisedAbove) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 16);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 10; ++i) {
        segments.push_back(filled_segment(tiers.top, 4, i));
        ASSERT_EQ(tiers.top.evict(segments[i]), 0u);
    }
    tiers.engine->script(SimFault::io_error_forever);
    for (int access = 0; access < 2; ++access) {
        EXPECT_THROW(static_cast<void>(pin(tiers.top, segments[0], Access::read)), TierIoError);
    }
    for (std::uint32_t i = 1; i < 10; ++i) {
        const PinGuard guard = pin(tiers.top, segments[i], Access::read);
        ASSERT_TRUE(holds(*segments[i], i));
    }
}

// A full disk is raised once above and loses nothing. Method: scripted ENOSPC while pages are pushed down.
TEST(TierStore, FullDiskBelowLosesNothing) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 16);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 4; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    tiers.engine->script(SimFault::no_space);
    std::size_t raised = 0;
    for (std::uint32_t i = 4; i < 10; ++i) {
        try {
            segments.push_back(filled_segment(tiers.top, 4, i));
        } catch (const TierIoError&) {
            ++raised;
            segments.push_back(filled_segment(tiers.top, 4, i));
        }
    }
    for (int round = 0; round < 2; ++round) {
        for (std::uint32_t i = 0; i < 10; ++i) {
            try {
                const PinGuard guard = pin(tiers.top, segments[i], Access::read);
                ASSERT_TRUE(holds(*segments[i], i));
            } catch (const TierIoError&) {
                ++raised;
                --i;
            }
        }
    }
    EXPECT_EQ(raised, 1u);
}

TEST(TierStore, HostTooSmallToFeedADeviceIsRefused) {
    EmulatedDevice device;
    EXPECT_THROW(ThreeTiers(device, 8, 15), InvalidArgument);
}

// --- Lifetimes ----------------------------------------------------------------------------------------------------

/// Reads and writes of random pages; every read is compared.
void train_a_little(ThreeTiers& tiers, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    constexpr std::size_t kSegments = 10;
    std::vector<std::shared_ptr<Segment>> segments;
    std::vector<std::uint32_t> holding(kSegments);
    for (std::uint32_t i = 0; i < kSegments; ++i) {
        segments.push_back(filled_segment(tiers.top, 1 + random() % 4, i));
        holding[i] = i;
    }
    for (int step = 0; step < 30; ++step) {
        const std::size_t i = random() % kSegments;
        const bool is_write = random() % 3 == 0;
        const PinGuard guard = pin(tiers.top, segments[i], is_write ? Access::write : Access::read);
        ASSERT_TRUE(holds(*segments[i], holding[i])) << "seed " << seed << ", step " << step;
        if (is_write) fill(*segments[i], holding[i] = static_cast<std::uint32_t>(random()));
        if (random() % 4 == 0) tiers.top.prefetch(segments[random() % kSegments]);
    }
}

// Whatever the delays and capacities, every read gives what was written, and no memory is used before its copy has
// passed. Method: seeds, as many as OFFLOAD_TEST_SEEDS says.
TEST(TierStore, RandomDelaysChangeNothing) {
    const char* const wanted = std::getenv("OFFLOAD_TEST_SEEDS");
    const std::uint64_t seeds = wanted ? std::strtoull(wanted, nullptr, 10) : 40;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        EmulatedDevice device({.longest_delay = microseconds(seed % 4 * 50), .seed = seed});
        ThreeTiers tiers(device, 6 + seed % 7, 16 + seed % 11);
        ASSERT_NO_THROW(train_a_little(tiers, seed));
    }
}

/// Streams whose events have always passed: a wait that somebody forgot.
class ForgetfulDevice final : public Device {
public:
    std::unique_ptr<Stream> make_stream(LinkDirection direction) override {
        return std::make_unique<ForgetfulStream>(device_.make_stream(direction));
    }
    void check_idle(std::span<const std::byte> memory) const override { device_.check_idle(memory); }
    void poison(std::span<std::byte> memory) noexcept override { device_.poison(memory); }
    std::string name() const override { return "forgetful"; }

private:
    struct PassedEvent final : Event {
        bool has_passed() const noexcept override { return true; }
        void wait() const override {}
    };
    class ForgetfulStream final : public Stream {
    public:
        explicit ForgetfulStream(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
        void copy(std::span<std::byte> to, std::span<const std::byte> from) override { stream_->copy(to, from); }
        std::shared_ptr<const Event> record() override { return std::make_shared<PassedEvent>(); }

    private:
        std::unique_ptr<Stream> stream_;
    };

    EmulatedDevice device_{{.longest_delay = microseconds(2000), .seed = 5}};
};

// The check of lifetimes finds a missing wait. Method: the same steps with events that pass at once.
TEST(TierStore, MissingWaitIsFound) {
    ForgetfulDevice device;
    ThreeTiers tiers(device, 8, 16);
    EXPECT_THROW(
        {
            for (std::uint32_t i = 0; i < 10; ++i) {
                const auto segment = filled_segment(tiers.top, 4, i);
                tiers.top.evict(segment);
                static_cast<void>(pin(tiers.top, segment, Access::read));
            }
        },
        LogicError);
}

}  // namespace
}  // namespace torch_offload::test
