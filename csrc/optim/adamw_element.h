// What AdamW and the writeback of gradients do to one element. The only place that has the formulas: the loops for each
// instruction set and the CUDA kernels are made of these functions. Included where the instructions are chosen, so
// everything here has internal linkage and no standard header may be included from here.
//
// Each line is one fp32 operation rounded by itself: compiled with -ffp-contract=off for processors, with -fmad=false
// and exact division and square root for CUDA. Layer optim, without torch.
#pragma once

#include "base/host_device.h"
#include "optim/adamw_kernels.h"
#include "optim/split_master.h"

namespace torch_offload {
namespace {

OFFLOAD_HOST_DEVICE inline float as_float(std::uint32_t bits) noexcept { return __builtin_bit_cast(float, bits); }
OFFLOAD_HOST_DEVICE inline std::uint32_t bits_of(float value) noexcept {
    return __builtin_bit_cast(std::uint32_t, value);
}
OFFLOAD_HOST_DEVICE inline float canonical(float value) noexcept {
    return as_float(with_canonical_nan(bits_of(value)));
}

OFFLOAD_HOST_DEVICE inline float square_root(float value) noexcept {
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(value);
#else
    return __builtin_sqrtf(value);
#endif
}

OFFLOAD_HOST_DEVICE inline float widened(std::uint16_t bf16) noexcept {
    return as_float(static_cast<std::uint32_t>(bf16) << 16);
}

/// Rounded to bf16, ties to even, as torch casts.
OFFLOAD_HOST_DEVICE inline float rounded_to_bf16(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
    return as_float(is_nan_bits(bits) ? kCanonicalNan : rounded);
}

// --- Gradients ----------------------------------------------------------------------------------------------------

OFFLOAD_HOST_DEVICE inline float unscaled(float gradient, float scale) noexcept { return gradient / scale; }

/// kIsRounded: to bf16, as an operator that scales a bf16 gradient in place would.
template <bool kIsRounded>
OFFLOAD_HOST_DEVICE inline float clipped(float gradient, float clip) noexcept {
    return kIsRounded ? rounded_to_bf16(gradient * clip) : gradient * clip;
}

// --- Moments ------------------------------------------------------------------------------------------------------

/// Interpolates from the nearer end, as torch's lerp does.
OFFLOAD_HOST_DEVICE inline float next_average(float weight, float gradient, float average) noexcept {
    const bool is_near = weight < 0.5F;
    const float start = is_near ? average : gradient;
    const float part = is_near ? weight : weight - 1.0F;
    return canonical(start + part * (gradient - average));
}

OFFLOAD_HOST_DEVICE inline float next_square(float keep, float weight, float gradient, float square) noexcept {
    return canonical(keep * square + weight * gradient * gradient);
}

/// A not-a-number on either side stays.
OFFLOAD_HOST_DEVICE inline float next_largest(float square, float largest) noexcept {
    const bool is_larger = largest < square || is_nan_bits(bits_of(square));
    return is_larger ? square : largest;
}

// --- The step -----------------------------------------------------------------------------------------------------

OFFLOAD_HOST_DEVICE inline float next_master(const AdamWFactors& f, float average, float square,
                                             float master) noexcept {
    const float denominator = square_root(square) / f.square_correction + f.eps;
    return master * f.decay + f.negative_step * average / denominator;
}

}  // namespace
}  // namespace torch_offload
