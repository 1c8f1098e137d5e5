// The loops that pack and unpack one block of packed_moments.h. Like adamw_loops.h, compiled once per instruction set:
// internal linkage, no standard headers. Layer optim, without torch.
#pragma once

#include "optim/packed_element.h"
#include "optim/packed_moments.h"

namespace torch_offload {
namespace {

template <Moment kMoment>
constexpr const float* levels_of() noexcept {
    if constexpr (kMoment == Moment::first) {
        return kFirstLevels.values;
    } else {
        return kSecondLevels.values;
    }
}

/// `count` elements of the block, which has at least `count` bytes and kScaleBits.
template <Moment kMoment>
void unpack_block(const std::uint8_t* __restrict packed, std::size_t count, float* __restrict values) noexcept {
    const float* levels = levels_of<kMoment>();
    const float scale = scale_of_block(packed);
    const std::size_t head = count < kScaleBits ? count : kScaleBits;
    for (std::size_t i = 0; i < head; ++i) {
        values[i] = unpacked<kMoment>(levels, packed[i], index_of<kMoment>(packed[i], true), scale);
    }
    for (std::size_t i = head; i < count; ++i) {
        values[i] = unpacked<kMoment>(levels, packed[i], index_of<kMoment>(packed[i], false), scale);
    }
}

inline float block_scale(const float* __restrict values, std::size_t count) noexcept {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = magnitude_bits(values[i]);
        largest = bits > largest ? bits : largest;
    }
    return scale_of_largest(largest);
}

/// Writes all kPackedBlock bytes.
template <Moment kMoment>
void pack_block(const float* __restrict values, std::size_t count, std::uint8_t* __restrict packed) noexcept {
    const float scale = block_scale(values, count);
    const PackDivisor divisor = pack_divisor(scale);
    for (std::size_t i = 0; i < count; ++i) {
        packed[i] = static_cast<std::uint8_t>(packed_byte<kMoment>(values[i], divisor));
    }
    for (std::size_t i = count; i < kPackedBlock; ++i) packed[i] = 0;
    const std::uint32_t scale_bits = __builtin_bit_cast(std::uint32_t, scale);
    for (std::size_t i = 0; i < kScaleBits; ++i) {
        packed[i] = static_cast<std::uint8_t>(with_scale_bit<kMoment>(packed[i], (scale_bits >> i) & 1));
    }
}

}  // namespace
}  // namespace torch_offload
