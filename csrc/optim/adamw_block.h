// AdamW as a team of threads does it: the numbers of adamw_update, and so its bits. Internal linkage like
// adamw_element.h. Layer optim, without torch.
#pragma once

#include "optim/adamw_element.h"
#include "optim/adamw_kernels.h"
#include "optim/packed_element.h"
#include "optim/thread_team.h"
#include "optim/writeback_block.h"

namespace torch_offload {
namespace {

OFFLOAD_HOST_DEVICE inline float scaled(const GradientScaling& scaling, GradientType type, float gradient) noexcept {
    if (scaling.has_scale) gradient = unscaled(gradient, scaling.scale);
    if (!scaling.has_clip) return gradient;
    return type == GradientType::bf16 ? clipped<true>(gradient, scaling.clip) : clipped<false>(gradient, scaling.clip);
}

/// What a lane holds of one group while it is worked on.
struct GroupValues {
    alignas(16) float gradients[kGroup];
    alignas(16) float masters[kGroup];
    alignas(16) float averages[kGroup];
    alignas(16) float squares[kGroup];
    alignas(16) float largest[kGroup];  // AMSGrad only
};

/// What is the same for all elements of a launch.
struct GroupStep {
    AdamWArrays arrays;
    AdamWFactors factors;
    GradientScaling scaling;
    bool is_aligned;  // every array begins at a multiple of 16 bytes
};

OFFLOAD_DEVICE inline void load_masters_group(const GroupStep& step, std::size_t begin, std::size_t count,
                                              float (&to)[kGroup]) noexcept {
    const AdamWArrays& arrays = step.arrays;
    if (!arrays.low) return load_group(arrays.masters + begin, count, step.is_aligned, to);
    alignas(16) std::uint16_t weights[kGroup];
    alignas(16) std::int16_t low[kGroup];
    load_group(arrays.weights + begin, count, step.is_aligned, weights);
    load_group(arrays.low + begin, count, step.is_aligned, low);
    for (std::size_t i = 0; i < kGroup; ++i) to[i] = as_float(join_master({weights[i], low[i]}));
}

OFFLOAD_DEVICE inline void store_masters_group(const GroupStep& step, std::size_t begin, std::size_t count,
                                               const float (&masters)[kGroup]) noexcept {
    const AdamWArrays& arrays = step.arrays;
    alignas(16) std::uint16_t weights[kGroup];
    alignas(16) std::int16_t low[kGroup];
    alignas(16) float whole[kGroup];
    for (std::size_t i = 0; i < kGroup; ++i) {
        const SplitMaster halves = split_master(bits_of(masters[i]));
        weights[i] = halves.weight;
        low[i] = halves.low;
        whole[i] = canonical(masters[i]);
    }
    if (arrays.weights) store_group(weights, count, step.is_aligned, arrays.weights + begin);
    if (arrays.low) return store_group(low, count, step.is_aligned, arrays.low + begin);
    store_group(whole, count, step.is_aligned, arrays.masters + begin);
}

/// Gradient and master come and go; the moments are there.
OFFLOAD_DEVICE inline void update_group(const GroupStep& step, std::size_t begin, std::size_t count,
                                        GroupValues& v) noexcept {
    const AdamWFactors& f = step.factors;
    const GradientType type = step.arrays.gradient_type;
    const bool is_amsgrad = step.arrays.max_exp_avg_sq != nullptr;
    load_gradient_group(step.arrays.gradients, type, begin, count, step.is_aligned, v.gradients);
    load_masters_group(step, begin, count, v.masters);
    for (std::size_t i = 0; i < kGroup; ++i) {
        const float unsigned_gradient = scaled(step.scaling, type, v.gradients[i]);
        const float gradient = f.is_maximizing ? -unsigned_gradient : unsigned_gradient;
        v.averages[i] = next_average(f.average_weight, gradient, v.averages[i]);
        v.squares[i] = next_square(f.square_keep, f.square_weight, gradient, v.squares[i]);
        if (is_amsgrad) v.largest[i] = next_largest(v.squares[i], v.largest[i]);
        v.masters[i] = next_master(f, v.averages[i], is_amsgrad ? v.largest[i] : v.squares[i], v.masters[i]);
    }
    store_masters_group(step, begin, count, v.masters);
}

// --- fp32 moments -------------------------------------------------------------------------------------------------

OFFLOAD_DEVICE inline void update_wide_group(const GroupStep& step, std::size_t begin) noexcept {
    const AdamWArrays& arrays = step.arrays;
    const std::size_t count = group_count(begin, arrays.count);
    GroupValues values;
    load_group(arrays.exp_avg + begin, count, step.is_aligned, values.averages);
    load_group(arrays.exp_avg_sq + begin, count, step.is_aligned, values.squares);
    if (arrays.max_exp_avg_sq) load_group(arrays.max_exp_avg_sq + begin, count, step.is_aligned, values.largest);
    update_group(step, begin, count, values);
    store_group(values.averages, count, step.is_aligned, arrays.exp_avg + begin);
    store_group(values.squares, count, step.is_aligned, arrays.exp_avg_sq + begin);
    if (arrays.max_exp_avg_sq) store_group(values.largest, count, step.is_aligned, arrays.max_exp_avg_sq + begin);
}

/// Groups `first`, `first + stride`, ...: elements do not depend on one another.
OFFLOAD_DEVICE inline void update_wide_groups(const GroupStep& step, std::size_t first, std::size_t stride) noexcept {
    for (std::size_t begin = first * kGroup; begin < step.arrays.count; begin += stride * kGroup) {
        update_wide_group(step, begin);
    }
}

// --- 8-bit moments ------------------------------------------------------------------------------------------------

static_assert(kPackedBlock == kTeamLanes * kGroup, "a team takes a block");

template <Moment kMoment>
constexpr std::size_t kLevelCount = std::size_t{1} << kIndexBits<kMoment>;

/// A moment of one block. Values lie by their position in the group, then by lane: lanes that write at a time write
/// neighbours.
template <Moment kMoment>
struct SharedMoment {
    float levels[kLevelCount<kMoment>];
    float values[kGroup][kTeamLanes];
    std::uint32_t largest[kTeamLanes];  // bits of magnitudes
    float scale;
};

struct PackedShared {
    SharedMoment<Moment::first> average;
    SharedMoment<Moment::second> square;
};

OFFLOAD_DEVICE inline bool in_head(std::size_t lane, std::size_t position) noexcept {
    return lane * kGroup + position < kScaleBits;
}

template <Moment kMoment>
OFFLOAD_DEVICE inline void unpack_group(const SharedMoment<kMoment>& shared, const std::uint8_t* block,
                                        std::size_t lane, std::size_t count, bool is_aligned,
                                        float (&values)[kGroup]) noexcept {
    alignas(16) std::uint8_t bytes[kGroup];
    load_group(block + lane * kGroup, count, is_aligned, bytes);
    for (std::size_t i = 0; i < kGroup; ++i) {
        const std::uint32_t index = index_of<kMoment>(bytes[i], in_head(lane, i));
        values[i] = unpacked<kMoment>(shared.levels, bytes[i], index, shared.scale);
    }
}

/// Elements that are not there count as zeros.
template <Moment kMoment>
OFFLOAD_DEVICE inline void share_group(const float (&values)[kGroup], std::size_t lane, std::size_t count,
                                       SharedMoment<kMoment>& shared) noexcept {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < kGroup; ++i) {
        const float value = i < count ? values[i] : 0.0F;
        shared.values[i][lane] = value;
        largest = largest < magnitude_bits(value) ? magnitude_bits(value) : largest;
    }
    shared.largest[lane] = largest;
}

template <Moment kMoment>
OFFLOAD_DEVICE inline void pack_group(const SharedMoment<kMoment>& shared, std::size_t lane, std::size_t count,
                                      bool is_aligned, std::uint8_t* block) noexcept {
    const float scale = scale_of_largest(shared.largest[0]);
    const PackDivisor divisor = pack_divisor(scale);
    alignas(16) std::uint8_t bytes[kGroup];
    for (std::size_t i = 0; i < kGroup; ++i) {
        std::uint32_t byte = i < count ? packed_byte<kMoment>(shared.values[i][lane], divisor) : 0;
        const std::size_t position = lane * kGroup + i;
        if (in_head(lane, i)) byte = with_scale_bit<kMoment>(byte, (bits_of(scale) >> position) & 1);
        bytes[i] = static_cast<std::uint8_t>(byte);
    }
    store_group(bytes, kGroup, is_aligned, block + lane * kGroup);
}

/// The scales are read by two lanes of different warps.
template <typename Team>
OFFLOAD_DEVICE void update_packed_block(const Team& team, const GroupStep& step, std::size_t block,
                                        PackedShared& shared) {
    const AdamWArrays& arrays = step.arrays;
    std::uint8_t* const average = arrays.packed_exp_avg + block;
    std::uint8_t* const square = arrays.packed_exp_avg_sq + block;
    team.each([&](std::size_t lane) {
        if (lane == 0) shared.average.scale = scale_of_block(average);
        if (lane == kTeamLanes / 2) shared.square.scale = scale_of_block(square);
    });
    team.each([&](std::size_t lane) {
        const std::size_t begin = block + lane * kGroup;
        const std::size_t count = group_count(begin, arrays.count);
        GroupValues values;
        unpack_group(shared.average, average, lane, count, step.is_aligned, values.averages);
        unpack_group(shared.square, square, lane, count, step.is_aligned, values.squares);
        update_group(step, begin, count, values);
        share_group(values.averages, lane, count, shared.average);
        share_group(values.squares, lane, count, shared.square);
    });
    const auto larger = [](std::uint32_t one, std::uint32_t other) { return one < other ? other : one; };
    join_by_halves(team, shared.average.largest, larger);
    join_by_halves(team, shared.square.largest, larger);
    team.each([&](std::size_t lane) {
        const std::size_t count = group_count(block + lane * kGroup, arrays.count);
        pack_group(shared.average, lane, count, step.is_aligned, average);
        pack_group(shared.square, lane, count, step.is_aligned, square);
    });
}

/// Blocks `first`, `first + stride`, ... of packed moments. The step uses moments before they are rounded.
template <typename Team>
OFFLOAD_DEVICE void update_packed_blocks(const Team& team, const GroupStep& step, const PackedLevels<7>& first_levels,
                                         const PackedLevels<8>& second_levels, std::size_t first, std::size_t stride,
                                         PackedShared& shared) {
    team.each([&](std::size_t lane) {
        if (lane < kLevelCount<Moment::first>) shared.average.levels[lane] = first_levels.values[lane];
        shared.square.levels[lane] = second_levels.values[lane];
    });
    for (std::size_t block = first * kPackedBlock; block < step.arrays.count; block += stride * kPackedBlock) {
        update_packed_block(team, step, block, shared);
    }
}

}  // namespace
}  // namespace torch_offload
