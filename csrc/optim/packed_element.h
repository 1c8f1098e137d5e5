// How one element of packed_moments.h becomes its byte and back: what the loops for processors and the CUDA kernel are
// made of. Like adamw_element.h: internal linkage, no standard headers. Layer optim, without torch.
#pragma once

#include "base/host_device.h"
#include "optim/packed_moments.h"
#include "optim/split_master.h"

namespace torch_offload {
namespace {

template <Moment kMoment>
constexpr int kIndexBits = kMoment == Moment::first ? 7 : 8;
template <Moment kMoment>
constexpr std::uint32_t kIndexMask = (1u << kIndexBits<kMoment>)-1;

constexpr std::uint32_t kOne = 0x3F800000;  // 1.0F
constexpr std::uint32_t kTen = 0x41200000;  // 10.0F

/// The index whose level is nearest to a number in [0, 1]: the decade, then the position in it. Position 0 is the
/// decade below's last level. Numbers that are not negative are ordered like their bits, which compare without
/// branches, and powers of two are made of theirs: looking them up takes longer.
template <int kBits>
OFFLOAD_HOST_DEVICE inline std::uint32_t nearest_index(std::uint32_t bits) noexcept {
    constexpr float kTenths[] = {1e-1F, 1e-2F, 1e-3F, 1e-4F, 1e-5F, 1e-6F, 1e-7F};
    std::uint32_t below = 0;  // decades between this one and the highest
    float tens = 1.0F;        // to the power of that; exact
    for (int i = 0; i < kBits - 1; ++i) {
        const bool is_below = bits <= __builtin_bit_cast(std::uint32_t, kTenths[i]);
        below += is_below ? 1 : 0;
        tens *= __builtin_bit_cast(float, is_below ? kTen : kOne);
    }
    const float steps = __builtin_bit_cast(float, kOne + ((kBits - 1 - below) << 23));
    const float position = (__builtin_bit_cast(float, bits) * tens - 0.1F) * (1.0F / 0.9F) * steps;
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(steps - 1.0F + position + 0.5F));
}

/// `block`: [kScaleBits] and more.
OFFLOAD_HOST_DEVICE inline float scale_of_block(const std::uint8_t* block) noexcept {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < kScaleBits; ++i) bits |= static_cast<std::uint32_t>(block[i] & 1) << i;
    return __builtin_bit_cast(float, bits);
}

/// The index that an element holds; `is_head`: its lowest bit is one of the scale's.
template <Moment kMoment>
OFFLOAD_HOST_DEVICE inline std::uint32_t index_of(std::uint32_t byte, bool is_head) noexcept {
    const std::uint32_t index = byte & kIndexMask<kMoment>;
    const std::uint32_t even = index & ~1u;
    return !is_head ? index : (even == 0 ? 0 : even | 1);
}

template <Moment kMoment>
OFFLOAD_HOST_DEVICE inline float unpacked(const float* levels, std::uint32_t byte, std::uint32_t index,
                                          float scale) noexcept {
    const std::uint32_t sign = kMoment == Moment::second ? 0 : (byte & 0x80) << 24;
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, levels[index] * scale) | sign;
    return __builtin_bit_cast(float, with_canonical_nan(bits));
}

OFFLOAD_HOST_DEVICE inline std::uint32_t magnitude_bits(float value) noexcept {
    return __builtin_bit_cast(std::uint32_t, value) & 0x7FFFFFFF;
}

/// The scale of a block by the largest magnitude in it: not-a-number if there is a value that is not finite.
OFFLOAD_HOST_DEVICE inline float scale_of_largest(std::uint32_t largest) noexcept {
    return __builtin_bit_cast(float, largest >= 0x7F800000 ? kCanonicalNan : largest);
}

/// What a block's values are divided by, and which bits of an index stay: none where all values are zero or the scale
/// is not a number.
struct PackDivisor {
    float divisor;
    std::uint32_t mask;
};
OFFLOAD_HOST_DEVICE inline PackDivisor pack_divisor(float scale) noexcept {
    return scale > 0.0F ? PackDivisor{scale, 0xFF} : PackDivisor{1.0F, 0};
}

/// Values that count as zero get index 0.
template <Moment kMoment>
OFFLOAD_HOST_DEVICE inline std::uint32_t packed_byte(float value, PackDivisor by) noexcept {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const float ratio = __builtin_bit_cast(float, bits & 0x7FFFFFFF) / by.divisor;
    const std::uint32_t ratio_bits = __builtin_bit_cast(std::uint32_t, ratio);
    std::uint32_t index = nearest_index<kIndexBits<kMoment>>(ratio_bits < kOne ? ratio_bits : kOne);
    if (kMoment == Moment::second) {
        index += static_cast<std::uint32_t>(index == 0) & static_cast<std::uint32_t>(bits != 0);
    } else {
        index |= (bits >> 31) << 7;
    }
    return index & by.mask;
}

/// A byte of the head with its bit of the scale: an even index makes room by becoming the next odd one.
template <Moment kMoment>
OFFLOAD_HOST_DEVICE inline std::uint32_t with_scale_bit(std::uint32_t byte, std::uint32_t bit) noexcept {
    const std::uint32_t index = byte & kIndexMask<kMoment>;
    const std::uint32_t odd = index == 0 ? 0 : (index < 3 ? 3 : index | 1);
    return (byte & ~kIndexMask<kMoment> & 0xFF) | (odd & ~1u) | bit;
}

}  // namespace
}  // namespace torch_offload
