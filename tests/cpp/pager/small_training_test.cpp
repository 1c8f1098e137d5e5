// Training in small, every byte of which is known, over a device, a host and a disk.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "device/emulated_device.h"
#include "support/seeds.h"
#include "support/three_tiers.h"

namespace torch_offload::test {
namespace {

constexpr std::uint32_t kDecay = 3;  // of the moment, in a step

std::span<std::uint32_t> words_of(std::span<std::byte> bytes) {
    return {reinterpret_cast<std::uint32_t*>(bytes.data()), bytes.size() / sizeof(std::uint32_t)};
}

bool all_are(std::span<std::byte> bytes, std::uint32_t word) {
    const std::span<std::uint32_t> words = words_of(bytes);
    return std::all_of(words.begin(), words.end(), [&](std::uint32_t found) { return found == word; });
}

/// Steps of a network of one parameter per layer: forward, backward and a deferred update, as autograd and the recorder
/// make them. The same is computed in plain memory, and every read compared.
class SmallTraining {
public:
    /// Layers of one to `most_pages` pages.
    SmallTraining(Pager& pager, std::uint64_t seed, std::size_t layers, std::size_t most_pages);
    ~SmallTraining();

    /// Returns the pages that were not as they had to be.
    std::size_t step();
    /// The same for everything, states included.
    std::size_t differences();

private:
    struct Layer {
        std::shared_ptr<Segment> weight, gradient, moment;
        std::vector<std::uint32_t> expected_weight, expected_moment, expected_gradient;  // per page: all words alike
        std::mutex turn{};                                                               // of an update
        std::mutex replacing{};                                                          // guards `gradient`; a leaf
    };

    std::shared_ptr<Segment> make(std::size_t pages, SegmentKind kind, TraceId role);
    std::size_t read(const std::shared_ptr<Segment>& segment, const std::vector<std::uint32_t>& expected);
    void write(const std::shared_ptr<Segment>& segment, const std::vector<std::uint32_t>& words);
    Layer& layer_of(const Segment& segment);
    bool update(Layer& layer, std::size_t index, bool may_wait);
    void postpone_update(Layer& layer);

    Pager& pager_;
    std::mt19937_64 random_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::vector<TraceId> activation_roles_;
};

SmallTraining::SmallTraining(Pager& pager, std::uint64_t seed, std::size_t layers, std::size_t most_pages)
    : pager_(pager), random_(seed) {
    for (std::size_t i = 0; i < layers; ++i) {
        const std::size_t pages = 1 + random_() % most_pages;
        auto layer = std::make_unique<Layer>();
        const TraceId role = pager.new_trace_id();
        layer->weight = make(pages, SegmentKind::parameter, role);
        layer->moment = make(pages, SegmentKind::state, pager.new_trace_id());
        pager.set_anchor(*layer->moment, role);
        for (std::size_t page = 0; page < pages; ++page) {
            layer->expected_weight.push_back(static_cast<std::uint32_t>(random_()));
            layer->expected_moment.push_back(0);
        }
        write(layer->weight, layer->expected_weight);
        activation_roles_.push_back(pager.new_trace_id());
        layers_.push_back(std::move(layer));
    }
    pager.set_pending_work([this](Segment& segment, std::size_t index,
                                  bool may_wait) { return update(layer_of(segment), index, may_wait); },
                           [this](Segment& segment) {
                               Layer& layer = layer_of(segment);
                               const std::lock_guard lock(layer.replacing);
                               return std::vector{layer.weight, layer.gradient, layer.moment};
                           });
}

SmallTraining::~SmallTraining() { pager_.clear_pending_work(); }

std::shared_ptr<Segment> SmallTraining::make(std::size_t pages, SegmentKind kind, TraceId role) {
    std::shared_ptr<Segment> segment = pager_.create_segment(pages * kPageBytes, sizeof(std::uint32_t), kind);
    segment->label = "of a small training";
    segment->trace_id = role;
    return segment;
}

void SmallTraining::write(const std::shared_ptr<Segment>& segment, const std::vector<std::uint32_t>& words) {
    pager_.touch(segment);
    const PinGuard guard = pin(pager_, segment, Access::overwrite);
    for (std::size_t page = 0; page < words.size(); ++page) {
        std::ranges::fill(words_of(segment->page_range(page)), words[page]);
    }
}

std::size_t SmallTraining::read(const std::shared_ptr<Segment>& segment, const std::vector<std::uint32_t>& expected) {
    pager_.touch(segment);
    const PinGuard guard = pin(pager_, segment, Access::read);
    std::size_t different = 0;
    for (std::size_t page = 0; page < expected.size(); ++page) {
        different += all_are(segment->page_range(page), expected[page]) ? 0 : 1;
    }
    return different;
}

std::size_t SmallTraining::step() {
    std::size_t different = 0;
    std::vector<std::shared_ptr<Segment>> activations;
    std::vector<std::vector<std::uint32_t>> saved;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        different += read(layers_[i]->weight, layers_[i]->expected_weight);
        saved.push_back({static_cast<std::uint32_t>(random_())});
        activations.push_back(make(1, SegmentKind::activation, activation_roles_[i]));
        write(activations.back(), saved.back());
    }
    for (std::size_t i = layers_.size(); i-- > 0;) {
        Layer& layer = *layers_[i];
        different += read(layer.weight, layer.expected_weight);
        different += read(activations[i], saved[i]);
        activations.pop_back();
        layer.expected_gradient.assign(layer.weight->page_count(), static_cast<std::uint32_t>(random_()));
        std::shared_ptr<Segment> gradient = make(layer.weight->page_count(), SegmentKind::gradient, kNoTrace);
        pager_.set_anchor(*gradient, layer.weight->trace_id);
        write(gradient, layer.expected_gradient);
        const std::lock_guard lock(layer.replacing);
        layer.gradient.swap(gradient);
    }
    for (const auto& layer : layers_) postpone_update(*layer);
    pager_.end_step();
    return different;
}

void SmallTraining::postpone_update(Layer& layer) {
    for (std::size_t page = 0; page < layer.weight->page_count(); ++page) {
        layer.expected_moment[page] = layer.expected_moment[page] * kDecay + layer.expected_gradient[page];
        layer.expected_weight[page] += layer.expected_moment[page];
        for (const auto& segment : {layer.weight, layer.gradient, layer.moment}) {
            OFFLOAD_CHECK(pager_.set_pending(*segment, page), LogicError, "a page is pinned between two steps");
        }
    }
}

/// False if it gave up, as the recorder's answer.
bool SmallTraining::update(Layer& layer, std::size_t index, bool may_wait) {
    std::unique_lock turn(layer.turn, std::defer_lock);
    if (may_wait) {
        turn.lock();
    } else if (!turn.try_lock()) {
        return false;
    }
    if (!layer.weight->page(index).load().has(PageWord::kPending)) return true;
    const std::vector<std::shared_ptr<Segment>> segments{layer.weight, layer.gradient, layer.moment};
    UpdateLatch latch = pager_.latch_for_update(segments, index, may_wait);
    if (!latch) return false;
    const std::span<std::uint32_t> weight = words_of(latch.bytes(0));
    const std::span<std::uint32_t> gradient = words_of(latch.bytes(1));
    const std::span<std::uint32_t> moment = words_of(latch.bytes(2));
    for (std::size_t i = 0; i < weight.size(); ++i) {
        moment[i] = moment[i] * kDecay + gradient[i];
        weight[i] += moment[i];
    }
    latch.finish();
    latch.discard(1);
    return true;
}

SmallTraining::Layer& SmallTraining::layer_of(const Segment& segment) {
    for (const auto& layer : layers_) {
        const std::lock_guard lock(layer->replacing);
        for (const Segment* member : {layer->weight.get(), layer->gradient.get(), layer->moment.get()}) {
            if (member == &segment) return *layer;
        }
    }
    throw LogicError("a segment of no layer");
}

std::size_t SmallTraining::differences() {
    std::size_t different = 0;
    for (const auto& layer : layers_) {
        different += read(layer->weight, layer->expected_weight);
        different += read(layer->moment, layer->expected_moment);
    }
    return different;
}

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
