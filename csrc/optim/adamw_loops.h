// The loops of the AdamW kernel, compiled once per instruction set: each source file that includes this one chooses
// the instructions before, so everything here has internal linkage and no standard header may be included from here.
//
// Equal bits everywhere: a loop is plain fp32 arithmetic that the compiler may vectorise but not reassociate or
// contract (-ffp-contract=off), and division and square root are exactly rounded in all instruction sets.
// Layer optim, without torch.
#pragma once

#include "optim/adamw_element.h"
#include "optim/adamw_kernels.h"
#include "optim/packed_loops.h"
#include "optim/split_master.h"

namespace torch_offload {
namespace {

/// Elements that are worked on at a time: their intermediate values stay in the first cache.
constexpr std::size_t kRun = 256;

// --- Gradients ----------------------------------------------------------------------------------------------------

void load_gradients(const AdamWArrays& arrays, std::size_t begin, std::size_t count, float* __restrict to) noexcept {
    if (arrays.gradient_type == GradientType::f32) {
        const float* __restrict from = static_cast<const float*>(arrays.gradients) + begin;
        for (std::size_t i = 0; i < count; ++i) to[i] = from[i];
        return;
    }
    const std::uint16_t* __restrict from = static_cast<const std::uint16_t*>(arrays.gradients) + begin;
    for (std::size_t i = 0; i < count; ++i) to[i] = widened(from[i]);
}

void scale_gradients(const GradientScaling& scaling, GradientType type, std::size_t count,
                     float* __restrict gradients) noexcept {
    if (scaling.has_scale) {
        for (std::size_t i = 0; i < count; ++i) gradients[i] = unscaled(gradients[i], scaling.scale);
    }
    if (!scaling.has_clip) return;
    if (type == GradientType::bf16) {
        for (std::size_t i = 0; i < count; ++i) gradients[i] = clipped<true>(gradients[i], scaling.clip);
    } else {
        for (std::size_t i = 0; i < count; ++i) gradients[i] = clipped<false>(gradients[i], scaling.clip);
    }
}

void negate(std::size_t count, float* __restrict values) noexcept {
    for (std::size_t i = 0; i < count; ++i) values[i] = -values[i];
}

// --- Masters ------------------------------------------------------------------------------------------------------

void load_masters(const AdamWArrays& arrays, std::size_t begin, std::size_t count, float* __restrict to) noexcept {
    if (arrays.low) {
        const std::uint16_t* __restrict weights = arrays.weights + begin;
        const std::int16_t* __restrict low = arrays.low + begin;
        for (std::size_t i = 0; i < count; ++i) to[i] = as_float(join_master({weights[i], low[i]}));
        return;
    }
    const float* __restrict from = arrays.masters + begin;
    for (std::size_t i = 0; i < count; ++i) to[i] = from[i];
}

void store_masters(const AdamWArrays& arrays, std::size_t begin, std::size_t count,
                   const float* __restrict from) noexcept {
    if (arrays.weights) {
        std::uint16_t* __restrict weights = arrays.weights + begin;
        for (std::size_t i = 0; i < count; ++i) weights[i] = split_master(bits_of(from[i])).weight;
    }
    if (arrays.low) {
        std::int16_t* __restrict low = arrays.low + begin;
        for (std::size_t i = 0; i < count; ++i) low[i] = split_master(bits_of(from[i])).low;
        return;
    }
    float* __restrict masters = arrays.masters + begin;
    for (std::size_t i = 0; i < count; ++i) masters[i] = canonical(from[i]);
}

// --- Moments ------------------------------------------------------------------------------------------------------

void update_average(const AdamWFactors& factors, std::size_t count, const float* __restrict gradients,
                    float* __restrict average) noexcept {
    const float weight = factors.average_weight;
    for (std::size_t i = 0; i < count; ++i) average[i] = next_average(weight, gradients[i], average[i]);
}

void update_square(const AdamWFactors& factors, std::size_t count, const float* __restrict gradients,
                   float* __restrict square) noexcept {
    const float keep = factors.square_keep;
    const float weight = factors.square_weight;
    for (std::size_t i = 0; i < count; ++i) square[i] = next_square(keep, weight, gradients[i], square[i]);
}

void update_largest(std::size_t count, const float* __restrict square, float* __restrict largest) noexcept {
    for (std::size_t i = 0; i < count; ++i) largest[i] = next_largest(square[i], largest[i]);
}

// --- The step -----------------------------------------------------------------------------------------------------

void take_step(const AdamWFactors& factors, std::size_t count, const float* __restrict average,
               const float* __restrict square, float* __restrict masters) noexcept {
    const AdamWFactors f = factors;
    for (std::size_t i = 0; i < count; ++i) masters[i] = next_master(f, average[i], square[i], masters[i]);
}

/// Where the moments of a run are while it is worked on.
struct MomentRun {
    float* average;
    float* square;
    float* largest;  // nullptr: not AMSGrad
};

void update_run(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling,
                std::size_t begin, std::size_t count, const MomentRun& moments) noexcept {
    alignas(64) float gradients[kRun];
    alignas(64) float masters[kRun];
    load_gradients(arrays, begin, count, gradients);
    scale_gradients(scaling, arrays.gradient_type, count, gradients);
    if (factors.is_maximizing) negate(count, gradients);
    load_masters(arrays, begin, count, masters);
    update_average(factors, count, gradients, moments.average);
    update_square(factors, count, gradients, moments.square);
    if (moments.largest) update_largest(count, moments.square, moments.largest);
    take_step(factors, count, moments.average, moments.largest ? moments.largest : moments.square, masters);
    store_masters(arrays, begin, count, masters);
}

void update_wide(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling) noexcept {
    for (std::size_t begin = 0; begin < arrays.count; begin += kRun) {
        const std::size_t left = arrays.count - begin;
        const MomentRun moments{arrays.exp_avg + begin, arrays.exp_avg_sq + begin,
                                arrays.max_exp_avg_sq ? arrays.max_exp_avg_sq + begin : nullptr};
        update_run(arrays, factors, scaling, begin, left < kRun ? left : kRun, moments);
    }
}

/// A block at a time, because its scale is known when all of it is updated. The step uses moments before they are
/// rounded.
void update_packed(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling) noexcept {
    alignas(64) float average[kPackedBlock];
    alignas(64) float square[kPackedBlock];
    for (std::size_t block = 0; block < arrays.count; block += kPackedBlock) {
        const std::size_t left = arrays.count - block;
        const std::size_t length = left < kPackedBlock ? left : kPackedBlock;
        unpack_block<Moment::first>(arrays.packed_exp_avg + block, length, average);
        unpack_block<Moment::second>(arrays.packed_exp_avg_sq + block, length, square);
        for (std::size_t run = 0; run < length; run += kRun) {
            const std::size_t count = length - run < kRun ? length - run : kRun;
            update_run(arrays, factors, scaling, block + run, count, {average + run, square + run, nullptr});
        }
        pack_block<Moment::first>(average, length, arrays.packed_exp_avg + block);
        pack_block<Moment::second>(square, length, arrays.packed_exp_avg_sq + block);
    }
}

void update_all(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling) noexcept {
    if (arrays.packed_exp_avg) {
        update_packed(arrays, factors, scaling);
    } else {
        update_wide(arrays, factors, scaling);
    }
}

}  // namespace
}  // namespace torch_offload
