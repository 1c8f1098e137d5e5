#include "pager/tier_store.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "device/emulated_device.h"
#include "support/pager_fixture.h"
#include "support/sim_engine.h"
#include "support/three_tiers.h"

namespace torch_offload::test {
namespace {

using std::chrono::microseconds;

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

// The log holds every byte that moved on every link, each transfer in its time. Method: a log that all tiers share; its
// bytes per lane are those of the statistics.
TEST(TierStore, LogHoldsEveryTransfer) {
    ActivityLog log;
    log.start(1 << 12);
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24, UpdatesOn::device, &log);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 15; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    for (std::uint32_t i = 0; i < 15; ++i) static_cast<void>(pin(tiers.top, segments[i], Access::read));
    tiers.top.flush();
    tiers.host.flush();
    const ActivityRecord record = log.copy();
    ASSERT_EQ(record.dropped_count, 0u);
    std::array<std::uint64_t, kActivityLaneCount> bytes{};
    for (const Activity& activity : record.activities) {
        bytes[static_cast<std::size_t>(activity.lane)] += activity.size_bytes;
        EXPECT_LE(record.begin_ns, activity.begin_ns);
        EXPECT_LE(activity.begin_ns, activity.end_ns);
        if (activity.size_bytes > 0) {
            EXPECT_EQ(activity.label().substr(0, 8), "segment ");
        }
    }
    const auto on = [&](ActivityLane lane) { return bytes[static_cast<std::size_t>(lane)]; };
    EXPECT_EQ(on(ActivityLane::to_device), total(tiers.top.statistics().read_bytes));
    EXPECT_EQ(on(ActivityLane::to_host), total(tiers.top.statistics().written_bytes));
    EXPECT_EQ(on(ActivityLane::ssd_read), total(tiers.host.statistics().read_bytes));
    EXPECT_EQ(on(ActivityLane::ssd_write), total(tiers.host.statistics().written_bytes));
    EXPECT_GT(on(ActivityLane::ssd_read), 0u);
}

// The host keeps what the program uses soonest, not what it used last. Method: 40 pages used in the same order in every
// step, over a device of 8 and a host of 24; by age every page would be read from the SSD in every step.
TEST(TierStore, HostKeepsWhatTheProgramUsesSoonest) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 40; ++i) segments.push_back(segment_with_role(tiers.top, 1, i));
    constexpr int kSteps = 3;
    std::uint64_t read_before = 0;
    for (int step = 0; step < 3 + kSteps; ++step) {
        if (step == 3) read_before = total(tiers.host.statistics().read_bytes);
        for (std::uint32_t i = 0; i < 40; ++i) {
            tiers.top.touch(segments[i]);
            const PinGuard guard = pin(tiers.top, segments[i], Access::read);
            ASSERT_TRUE(holds(*segments[i], i));
        }
        tiers.top.end_step();
    }
    const std::uint64_t read = total(tiers.host.statistics().read_bytes) - read_before;
    EXPECT_LT(read, kSteps * 32 * kPageBytes);
}

// What is used on the device next is read from the SSD ahead of time also while nothing comes up or goes down. Method:
// a device without room, a segment on the SSD that comes behind more than is looked ahead for, until that is used.
TEST(TierStore, HostReadsAheadWhileTheDeviceHasNoRoom) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    const auto first = segment_with_role(tiers.top, 6, 1);
    const auto second = segment_with_role(tiers.top, 2, 2);
    const auto next = segment_with_role(tiers.top, 4, 3);
    const auto held = filled_segment(tiers.top, 7, 4);
    const PinGuard guard = pin(tiers.top, held, Access::read);
    for (int step = 0; step < 2; ++step) {  // of the first it is not known when it began
        for (const auto& segment : {first, second, next}) tiers.top.touch(segment);
        tiers.top.end_step();
    }
    ASSERT_EQ(tiers.top.evict(next), 0u);
    ASSERT_EQ(tiers.host.statistics().prefetches, 0u);
    const auto is_read = [&] {
        for (const auto& segment : {first, second}) tiers.top.touch(segment);
        return tiers.host.is_resident(*next->backing());
    };
    EXPECT_TRUE(comes_true(is_read));
    EXPECT_EQ(tiers.top.statistics().prefetches, 0u);
}

// The host does not keep, nor write to the SSD, what the device has newer bytes of. Method: 32 pages written in order
// in every step, by operators and by updates, over a device of 16 and a host of 24: they fit in both together, and in
// neither the host nor the device alone.
TEST(TierStore, HostLetsGoWhatTheDeviceHasChanged) {
    constexpr std::uint32_t kPages = 32;
    EmulatedDevice device;
    ThreeTiers tiers(device, 16, 24);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < kPages; ++i) segments.push_back(segment_with_role(tiers.top, 1, i));
    constexpr std::uint32_t kSteps = 6;
    std::uint64_t moved_before = 0;
    const auto moved_bytes = [&] {
        const PagerStatistics on_host = tiers.host.statistics();
        return total(on_host.read_bytes) + total(on_host.written_bytes);
    };
    for (std::uint32_t step = 0; step < 3 + kSteps; ++step) {
        if (step == 3) moved_before = moved_bytes();
        for (std::uint32_t i = 0; i < kPages; ++i) {
            tiers.top.touch(segments[i]);
            if (i % 2 == 0) {
                const PinGuard guard = pin(tiers.top, segments[i], Access::write);
                ASSERT_TRUE(holds(*segments[i], i + step));
                fill(*segments[i], i + step + 1);
            } else {
                const UpdateLatch latch = tiers.top.latch_for_update({&segments[i], 1}, 0, true);
                ASSERT_TRUE(latch);
                auto* words = reinterpret_cast<std::uint32_t*>(latch.bytes(0).data());
                for (std::size_t k = 0; k < kPageElements; ++k) {
                    ASSERT_EQ(words[k], word_of(i + step, k));
                    words[k] = word_of(i + step + 1, k);
                }
            }
        }
        tiers.top.end_step();
    }
    EXPECT_LT(moved_bytes() - moved_before, kSteps * kPages * kPageBytes / 8);
}

// What goes from the host to the SSD is what the program uses last from where it is, though nothing has come up or gone
// down since it was elsewhere. Method: six segments on the host, the first of them touched; memory there for two pages
// more than there are.
TEST(TierStore, HostLetsGoWhatTheProgramHasJustUsed) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 16);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 6; ++i) {
        segments.push_back(segment_with_role(tiers.top, 2, i));
        tiers.top.touch(segments.back());
    }
    const auto held = tiers.top.create_segment(7 * kPageBytes, 4, SegmentKind::parameter);
    const PinGuard guard = pin(tiers.top, held, Access::overwrite);
    tiers.top.end_step();
    tiers.top.touch(segments[0]);
    ASSERT_EQ(total(tiers.host.statistics().written_bytes), 0u);
    const std::span<std::byte> range = tiers.host.allocate_range(5 * kPageBytes);
    EXPECT_FALSE(tiers.host.is_resident(*segments[0]->backing()));
    EXPECT_TRUE(tiers.host.is_resident(*segments[4]->backing()));
    tiers.host.free_range(range);
}

// What the device has is not read ahead from the SSD for it. Method: of two segments that are only on the SSD below,
// the one used first is on the device; the other one is read.
TEST(TierStore, HostDoesNotReadWhatTheDeviceHas) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    const auto above = segment_with_role(tiers.top, 2, 1);
    const auto next = segment_with_role(tiers.top, 2, 2);
    for (const auto& segment : {above, next}) ASSERT_EQ(tiers.top.evict(segment), 0u);
    const PinGuard used = pin(tiers.top, above, Access::read);
    ASSERT_EQ(tiers.host.evict(above->backing()), 0u);
    const auto held = filled_segment(tiers.top, 5, 3);
    const PinGuard guard = pin(tiers.top, held, Access::read);
    const std::uint64_t before = tiers.host.statistics().prefetches;
    for (int step = 0; step < 2; ++step) {
        for (const auto& segment : {above, next}) tiers.top.touch(segment);
        tiers.top.end_step();
    }
    EXPECT_TRUE(comes_true([&] { return tiers.host.is_resident(*next->backing()); }));
    EXPECT_EQ(tiers.host.statistics().prefetches - before, 2u);
    EXPECT_FALSE(tiers.host.is_resident(*above->backing()));
}

/// A parameter and a moment of it, both on the SSD, with deferred work that nobody applies.
struct DeferredUpdate {
    explicit DeferredUpdate(ThreeTiers& three) : tiers(three) {
        tiers.top.set_anchor(*moment, weight->trace_id);
        tiers.top.set_pending_work([](Segment&, std::size_t, bool) { return false; },
                                   [this](Segment&) { return std::vector{weight, moment}; });
        for (const auto& segment : {weight, moment}) {
            EXPECT_EQ(tiers.top.evict(segment), 0u);
            for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(tiers.top.set_pending(*segment, i));
        }
    }
    ~DeferredUpdate() { tiers.top.clear_pending_work(); }

    ThreeTiers& tiers;
    const std::shared_ptr<Segment> weight = segment_with_role(tiers.top, 2, 1);
    const std::shared_ptr<Segment> moment = segment_with_role(tiers.top, 2, 2);
};

// With a parameter that is used next, the host reads what its deferred work needs. Method: a device without room, a
// parameter and its moment on the SSD.
TEST(TierStore, HostReadsWhatDeferredWorkNeeds) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    const DeferredUpdate update(tiers);
    const auto held = filled_segment(tiers.top, 7, 3);
    const PinGuard guard = pin(tiers.top, held, Access::read);
    for (int step = 0; step < 2; ++step) {
        tiers.top.touch(update.weight);
        tiers.top.end_step();
    }
    EXPECT_TRUE(comes_true([&] { return tiers.host.is_resident(*update.weight->backing()); }));
    EXPECT_TRUE(comes_true([&] { return tiers.host.is_resident(*update.moment->backing()); }));
}

// What deferred work has been applied to is used last, and goes first from the host. Method: a parameter that is used
// twice in a step, others between and after, all on the host; its update is applied after the first use, then room for
// two pages is made.
TEST(TierStore, HostLetsGoWhatHasBeenUpdated) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 16, UpdatesOn::host);
    const DeferredUpdate update(tiers);
    std::vector<std::shared_ptr<Segment>> order{update.weight};
    for (std::uint32_t i = 3; i < 6; ++i) order.push_back(segment_with_role(tiers.top, 2, i));
    order.insert(order.end() - 1, update.weight);
    const auto held = filled_segment(tiers.top, 7, 6);
    const PinGuard guard = pin(tiers.top, held, Access::read);
    for (const auto& segment : order) tiers.top.touch(segment);
    tiers.top.end_step();
    tiers.top.touch(update.weight);
    const std::vector<std::shared_ptr<Segment>> updated{update.weight, update.moment};
    for (std::size_t i = 0; i < 2; ++i) {
        UpdateLatch latch = tiers.top.latch_for_update(updated, i, true);
        ASSERT_TRUE(latch);
        latch.finish();
    }
    const std::span<std::byte> range = tiers.host.allocate_range(7 * kPageBytes);
    EXPECT_FALSE(tiers.host.is_resident(*update.moment->backing()));
    tiers.host.free_range(range);
}

// What is evicted goes through the host to the SSD, and a segment that ends leaves nothing below. Method: two that were
// evicted, dropped. A thread that moved its pages may be its last owner for a moment.
TEST(TierStore, SegmentThatEndsLeavesNothingBelow) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    const auto is_below = [&](std::size_t pages) {
        const PagerStatistics host = tiers.host.statistics();
        return host.memory.frame_bytes == 0 && host.store.stored_bytes == pages * kPageBytes;
    };
    for (std::uint32_t i = 0; i < 2; ++i) {
        const auto segment = filled_segment(tiers.top, 4, i);
        EXPECT_EQ(tiers.top.evict(segment), 0u);
        EXPECT_TRUE(comes_true([&] { return is_below(4); }));
    }
    EXPECT_TRUE(comes_true([&] { return is_below(0); }));
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

// A pin that fails leaves the bytes below of what it would have overwritten. Method: a target whose only bytes are in
// the host's memory, which has sent pages away before, and a source that the SSD does not give.
TEST(TierStore, FailedPinOverwritesNothing) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    const auto source = filled_segment(tiers.top, 2, 1);
    ASSERT_EQ(tiers.top.evict(source), 0u);
    const auto target = filled_segment(tiers.top, 2, 2);
    const auto other = filled_segment(tiers.top, 7, 3);
    ASSERT_TRUE(
        comes_true([&] { return target->page(1).load().is_absent(); }));  // of a segment the last page goes first
    ASSERT_TRUE(Pager::in_memory(*target->backing(), 1));
    ASSERT_EQ(total(tiers.host.statistics().written_bytes), 2 * kPageBytes);  // the source's
    tiers.engine->refuse(IoDirection::read, EIO);
    const PinRequest requests[] = {{target, Access::overwrite}, {source, Access::read}};
    EXPECT_THROW(static_cast<void>(tiers.top.pin(requests)), TierIoError);
    const PinGuard guard = pin(tiers.top, target, Access::read);
    EXPECT_TRUE(holds(*target, 2));
}

// A disk that is full for a moment is not noticed above: other pages make room. Method: scripted ENOSPC while pages are
// pushed down.
TEST(TierStore, DiskThatIsFullForAMomentIsNotNoticed) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 16);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 4; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    tiers.engine->script(SimFault::no_space);
    for (std::uint32_t i = 4; i < 10; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    for (int round = 0; round < 2; ++round) {
        for (std::uint32_t i = 0; i < 10; ++i) {
            const PinGuard guard = pin(tiers.top, segments[i], Access::read);
            ASSERT_TRUE(holds(*segments[i], i));
        }
    }
    EXPECT_EQ(tiers.engine->injected_count(SimFault::no_space), 1u);
}

// What the host could not write is said at the end of a step above, once, and nothing is lost. Method: writes that are
// refused from when more comes down than the host leaves free.
TEST(TierStore, WriteThatFailedBelowIsRaisedAtTheEndOfAStep) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 24);
    tiers.engine->refuse(IoDirection::write, EIO);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 7; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    const auto raises = [&] {
        try {
            tiers.top.end_step();
            return false;
        } catch (const TierIoError& error) {
            EXPECT_EQ(error.error_number(), EIO) << error.what();
            return true;
        }
    };
    EXPECT_TRUE(comes_true(raises));
    tiers.engine->refuse(IoDirection::write, 0);
    for (std::uint32_t i = 0; i < 7; ++i) {
        const PinGuard guard = pin(tiers.top, segments[i], Access::read);
        ASSERT_TRUE(holds(*segments[i], i));
    }
}

// A page that the host has no room for is not lost above. Method: writes are refused for a while, so that the host
// makes no room for what is asked for; then they succeed.
TEST(TierStore, PageThatTheHostHasNoRoomForIsNotLost) {
    EmulatedDevice device;
    ThreeTiers tiers(device, 8, 16);
    std::vector<std::shared_ptr<Segment>> segments;
    for (std::uint32_t i = 0; i < 10; ++i) segments.push_back(filled_segment(tiers.top, 4, i));
    std::size_t raised = 0;
    for (int round = 0; round < 3; ++round) {
        const bool is_full = round < 2;
        tiers.engine->refuse(IoDirection::write, is_full ? ENOSPC : 0);
        for (std::uint32_t i = 0; i < 10; ++i) {
            try {
                const PinGuard guard = pin(tiers.top, segments[i], Access::write);
                ASSERT_TRUE(holds(*segments[i], i)) << "round " << round;
            } catch (const TierIoError& error) {
                ASSERT_TRUE(is_full) << error.what();
                EXPECT_EQ(error.error_number(), ENOSPC) << error.what();
                ++raised;
            }
        }
    }
    EXPECT_GT(raised, 0u);
}

TEST(TierStore, HostTooSmallToFeedADeviceIsRefused) {
    EmulatedDevice device;
    EXPECT_THROW(ThreeTiers(device, 8, 15), InvalidArgument);
}

// --- Lifetimes ----------------------------------------------------------------------------------------------------

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
