// Training in small over a pager, every byte of which is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "pager/pager.h"

namespace torch_offload::test {

inline std::span<std::uint32_t> words_of(std::span<std::byte> bytes) {
    return {reinterpret_cast<std::uint32_t*>(bytes.data()), bytes.size() / sizeof(std::uint32_t)};
}

/// Steps of a network of one parameter per layer: forward, backward and a deferred update, as autograd and the recorder
/// make them. The same is computed in plain memory, and every read compared. A step that throws leaves both as far as
/// they came: what was done is done in both, and the next step goes on from there.
class SmallTraining {
public:
    /// Layers of one to `most_pages` pages.
    SmallTraining(Pager& pager, std::uint64_t seed, std::size_t layers, std::size_t most_pages);
    ~SmallTraining();
    SmallTraining(const SmallTraining&) = delete;
    SmallTraining& operator=(const SmallTraining&) = delete;

    /// Returns the pages that were not as they had to be.
    std::size_t step();
    /// The same for everything, states included.
    std::size_t differences();
    /// What a store runs where updates are its own process's: its RunWork.
    static std::size_t run_update(std::span<const std::byte> operators, std::span<const std::span<std::byte>> pages,
                                  std::exception_ptr& error);

    /// What lives from one step to the next.
    std::vector<std::shared_ptr<Segment>> segments() const;

private:
    struct Layer {
        std::shared_ptr<Segment> weight, gradient, moment;
        std::vector<std::uint32_t> expected_weight, expected_moment, expected_gradient;  // per page: all words alike
        std::mutex turn{};                                                               // of an update
        std::mutex replacing{};                                                          // guards `gradient`; a leaf
        std::optional<std::size_t> half_marked{};  // a page of whose three only the weight's is sure to be pending
    };

    std::shared_ptr<Segment> make(std::size_t pages, SegmentKind kind, TraceId role, TraceId anchor = kNoTrace);
    std::size_t read(const std::shared_ptr<Segment>& segment, const std::vector<std::uint32_t>& expected);
    void write(const std::shared_ptr<Segment>& segment, const std::vector<std::uint32_t>& words);
    Layer& layer_of(const Segment& segment);
    bool update(Layer& layer, std::size_t index, bool may_wait);
    static void update_remotely(UpdateLatch& latch);
    void mark(Segment& segment, std::size_t index);
    void postpone_update(Layer& layer);
    void finish_marking();

    Pager& pager_;
    std::mt19937_64 random_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::vector<TraceId> activation_roles_;
};

}  // namespace torch_offload::test
