// The loops of the products, over vectors of one instruction set: internal linkage, no standard headers. Layer codec:
// includes base only.
//
// Bytes of T + 1, which are 0, 1 or 2, meet bytes of planes, from -128 to 127; so much as T + 1 adds to a token's sum
// is the token's total, which is taken away again.
//
// `Lanes` has vectors of kBytes / 4 sums of 32 bits: zero(), load(), store(), plus_products() of four bytes each with
// four, join(); and of kBytes bytes: weights(), no_weights(), bytes(), four_bytes(), interleave(). round() makes
// integers. It also says how many planes at a time fit its registers.
#pragma once

#include "codec/product_kernels.h"

namespace torch_offload {
namespace {

constexpr std::size_t kRowsTogether = 4;  // rows whose sums lie side by side in registers

/// How many of `left` planes to take at once: groups of the same size, or nearly so.
template <typename Lanes>
inline std::size_t planes_at_once(std::size_t left) noexcept {
    const std::size_t groups = (left + Lanes::kPlanes - 1) / Lanes::kPlanes;
    return (left + groups - 1) / groups;
}

inline std::uint32_t most_bits(const float* values, std::size_t width) noexcept {
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < width; ++i) {
        const std::uint32_t bits = magnitude_bits(values[i]);
        most = bits > most ? bits : most;
    }
    return most;
}

template <typename Lanes>
inline PlanedToken write_token(const float* values, std::size_t width, unsigned planes, std::int8_t* to) noexcept {
    const FixedPoint point(most_bits(values, width), planes);
    if (!point.is_finite()) return {point, 0};
    const PowerOfTwo power = point.to_integers();
    std::int64_t total = 0;
    for (std::size_t begin = 0; begin < width; begin += kPanelWidth) {
        std::int32_t integers[kPanelWidth];
        for (std::size_t i = 0; i < kPanelWidth; i += Lanes::kBytes / 4) {
            Lanes::round(values + begin + i, power, integers + i);
        }
        for (unsigned plane = 0; plane < planes; ++plane) {
            std::int8_t* const there = to + plane * width + begin;
            for (std::size_t i = 0; i < kPanelWidth; ++i) there[i] = plane_of(integers[i], plane);
        }
        for (std::size_t i = 0; i < kPanelWidth; ++i) total += integers[i];
    }
    return {point, total};
}

}  // namespace
}  // namespace torch_offload
