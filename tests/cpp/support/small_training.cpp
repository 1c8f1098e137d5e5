#include "support/small_training.h"

#include <algorithm>
#include <array>
#include <future>
#include <utility>

#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

constexpr std::uint32_t kDecay = 3;                        // of the moment, in a step
constexpr std::array kUpdate{std::byte{7}, std::byte{9}};  // as a store is told to run it

bool all_are(std::span<std::byte> bytes, std::uint32_t word) {
    const std::span<std::uint32_t> words = words_of(bytes);
    return std::all_of(words.begin(), words.end(), [&](std::uint32_t found) { return found == word; });
}

}  // namespace

SmallTraining::SmallTraining(Pager& pager, std::uint64_t seed, std::size_t layers, std::size_t most_pages)
    : pager_(pager), random_(seed) {
    for (std::size_t i = 0; i < layers; ++i) {
        const std::size_t pages = 1 + random_() % most_pages;
        auto layer = std::make_unique<Layer>();
        const TraceId role = pager.new_trace_id();
        layer->weight = make(pages, SegmentKind::parameter, role);
        layer->moment = make(pages, SegmentKind::state, pager.new_trace_id(), role);
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

std::shared_ptr<Segment> SmallTraining::make(std::size_t pages, SegmentKind kind, TraceId role, TraceId anchor) {
    std::shared_ptr<Segment> segment = pager_.create_segment(pages * kPageBytes, sizeof(std::uint32_t), kind);
    segment->assume({kind, "of a small training", role, anchor});
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
    finish_marking();
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
        std::shared_ptr<Segment> gradient =
            make(layer.weight->page_count(), SegmentKind::gradient, kNoTrace, layer.weight->trace_id);
        write(gradient, layer.expected_gradient);
        const std::lock_guard lock(layer.replacing);
        layer.gradient.swap(gradient);
    }
    for (const auto& layer : layers_) postpone_update(*layer);
    pager_.end_step();
    return different;
}

void SmallTraining::mark(Segment& segment, std::size_t index) {
    OFFLOAD_CHECK(pager_.set_pending(segment, index), LogicError, "a page is pinned between two steps");
}

/// A page's update is recorded once its weight is pending.
void SmallTraining::postpone_update(Layer& layer) {
    const std::lock_guard turn(layer.turn);
    for (std::size_t page = 0; page < layer.weight->page_count(); ++page) {
        mark(*layer.weight, page);
        layer.half_marked = page;
        layer.expected_moment[page] = layer.expected_moment[page] * kDecay + layer.expected_gradient[page];
        layer.expected_weight[page] += layer.expected_moment[page];
        for (const auto& segment : {layer.gradient, layer.moment}) mark(*segment, page);
        layer.half_marked.reset();
    }
}

/// Of updates that were recorded when a call threw, and not applied since.
void SmallTraining::finish_marking() {
    for (const auto& layer : layers_) {
        const std::lock_guard turn(layer->turn);
        if (!layer->half_marked) continue;
        const std::size_t page = *layer->half_marked;
        if (layer->weight->page(page).load().has(PageWord::kPending)) {
            for (const auto& segment : {layer->gradient, layer->moment}) mark(*segment, page);
        }
        layer->half_marked.reset();
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
    if (latch.is_remote()) {
        update_remotely(latch);
    } else {
        std::exception_ptr error;
        run_update(kUpdate, std::array{latch.bytes(0), latch.bytes(1), latch.bytes(2)}, error);
    }
    latch.finish();
    latch.discard(1);
    return true;
}

std::size_t SmallTraining::run_update(std::span<const std::byte> operators, std::span<const std::span<std::byte>> pages,
                                      std::exception_ptr& error) {
    OFFLOAD_CHECK(std::ranges::equal(operators, kUpdate) && pages.size() == 3, InvalidArgument, "another update");
    const std::span<std::uint32_t> weight = words_of(pages[0]);
    const std::span<std::uint32_t> gradient = words_of(pages[1]);
    const std::span<std::uint32_t> moment = words_of(pages[2]);
    for (std::size_t i = 0; i < weight.size(); ++i) {
        moment[i] = moment[i] * kDecay + gradient[i];
        weight[i] += moment[i];
    }
    error = nullptr;
    return 1;
}

void SmallTraining::update_remotely(UpdateLatch& latch) {
    std::promise<void> ended;
    const auto end = [&](std::size_t ran, std::exception_ptr error) {
        if (ran > 0) latch.note_ran();
        if (error) {
            ended.set_exception(error);
        } else {
            ended.set_value();
        }
    };
    const std::vector<std::byte> operators(kUpdate.begin(), kUpdate.end());
    latch.run_remotely({operators, {false, true, false}, end, [](const std::exception_ptr&) {}});
    ended.get_future().get();
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
    finish_marking();
    std::size_t different = 0;
    for (const auto& layer : layers_) {
        different += read(layer->weight, layer->expected_weight);
        different += read(layer->moment, layer->expected_moment);
    }
    return different;
}

std::vector<std::shared_ptr<Segment>> SmallTraining::segments() const {
    std::vector<std::shared_ptr<Segment>> all;
    for (const auto& layer : layers_) {
        for (const auto& segment : {layer->weight, layer->gradient, layer->moment}) {
            if (segment) all.push_back(segment);
        }
    }
    return all;
}

}  // namespace torch_offload::test
