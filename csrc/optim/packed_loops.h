// The loops that pack and unpack one block of packed_moments.h. Like adamw_loops.h, compiled once per instruction set:
// internal linkage, no standard headers. Layer optim, without torch.
#pragma once

#include "optim/packed_moments.h"
#include "optim/split_master.h"

namespace torch_offload {
namespace {

template <Moment kMoment>
struct PackedTraits;
template <>
struct PackedTraits<Moment::first> {
    static constexpr int kIndexBits = 7;
    static constexpr const float* kLevels = kFirstLevels.values;
};
template <>
struct PackedTraits<Moment::second> {
    static constexpr int kIndexBits = 8;
    static constexpr const float* kLevels = kSecondLevels.values;
};

constexpr std::uint32_t kOne = 0x3F800000;  // 1.0F
constexpr std::uint32_t kTen = 0x41200000;  // 10.0F
constexpr float kTenths[] = {1e-1F, 1e-2F, 1e-3F, 1e-4F, 1e-5F, 1e-6F, 1e-7F};

/// The index whose level is nearest to a number in [0, 1]: the decade, then the place in it. Place 0 is the decade
/// below's last level. Numbers that are not negative are ordered like their bits, which compare without branches, and
/// powers of two are made of theirs: looking them up takes longer.
template <int kBits>
inline std::uint32_t nearest_index(std::uint32_t bits) noexcept {
    std::uint32_t below = 0;  // decades between this one and the highest
    float tens = 1.0F;        // to the power of that; exact
    for (int i = 0; i < kBits - 1; ++i) {
        const bool is_below = bits <= __builtin_bit_cast(std::uint32_t, kTenths[i]);
        below += is_below ? 1 : 0;
        tens *= __builtin_bit_cast(float, is_below ? kTen : kOne);
    }
    const float steps = __builtin_bit_cast(float, kOne + ((kBits - 1 - below) << 23));
    const float place = (__builtin_bit_cast(float, bits) * tens - 0.1F) * (1.0F / 0.9F) * steps;
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(steps - 1.0F + place + 0.5F));
}

inline float scale_of_block(const std::uint8_t* packed) noexcept {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < kScaleBits; ++i) bits |= static_cast<std::uint32_t>(packed[i] & 1) << i;
    return __builtin_bit_cast(float, bits);
}

template <Moment kMoment>
inline float unpacked(std::uint32_t byte, std::uint32_t index, float scale) noexcept {
    const float magnitude = PackedTraits<kMoment>::kLevels[index] * scale;
    if (kMoment == Moment::second) return magnitude;
    return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, magnitude) | ((byte & 0x80) << 24));
}

/// `count` elements of the block, which has at least `count` bytes and kScaleBits.
template <Moment kMoment>
void unpack_block(const std::uint8_t* __restrict packed, std::size_t count, float* __restrict values) noexcept {
    constexpr std::uint32_t kIndexMask = (1u << PackedTraits<kMoment>::kIndexBits) - 1;
    const float scale = scale_of_block(packed);
    const std::size_t head = count < kScaleBits ? count : kScaleBits;
    for (std::size_t i = 0; i < head; ++i) {
        const std::uint32_t even = packed[i] & kIndexMask & ~1u;
        values[i] = unpacked<kMoment>(packed[i], even == 0 ? 0 : even | 1, scale);
    }
    for (std::size_t i = head; i < count; ++i) {
        values[i] = unpacked<kMoment>(packed[i], packed[i] & kIndexMask, scale);
    }
    for (std::size_t i = 0; i < count; ++i) {
        values[i] = __builtin_bit_cast(float, with_canonical_nan(__builtin_bit_cast(std::uint32_t, values[i])));
    }
}

/// The largest magnitude, or a not-a-number if there is a value that is not finite.
inline float block_scale(const float* __restrict values, std::size_t count) noexcept {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, values[i]) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return __builtin_bit_cast(float, largest >= 0x7F800000 ? kCanonicalNan : largest);
}

/// Values that count as zero get index 0, and so does everything where the scale is not a number.
template <Moment kMoment>
void pack_indices(const float* __restrict values, std::size_t count, float scale,
                  std::uint8_t* __restrict to) noexcept {
    const bool is_usable = scale > 0.0F;
    const float divisor = is_usable ? scale : 1.0F;
    const std::uint32_t mask = is_usable ? 0xFF : 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, values[i]);
        const float ratio = __builtin_bit_cast(float, bits & 0x7FFFFFFF) / divisor;
        const std::uint32_t ratio_bits = __builtin_bit_cast(std::uint32_t, ratio);
        std::uint32_t index = nearest_index<PackedTraits<kMoment>::kIndexBits>(ratio_bits < kOne ? ratio_bits : kOne);
        if (kMoment == Moment::second) {
            index += static_cast<std::uint32_t>(index == 0) & static_cast<std::uint32_t>(bits != 0);
        } else {
            index |= (bits >> 31) << 7;
        }
        to[i] = static_cast<std::uint8_t>(index & mask);
    }
}

/// Writes all kPackedBlock bytes.
template <Moment kMoment>
void pack_block(const float* __restrict values, std::size_t count, std::uint8_t* __restrict packed) noexcept {
    constexpr std::uint32_t kIndexMask = (1u << PackedTraits<kMoment>::kIndexBits) - 1;
    const float scale = block_scale(values, count);
    pack_indices<kMoment>(values, count, scale, packed);
    for (std::size_t i = count; i < kPackedBlock; ++i) packed[i] = 0;
    const std::uint32_t scale_bits = __builtin_bit_cast(std::uint32_t, scale);
    for (std::size_t i = 0; i < kScaleBits; ++i) {
        const std::uint32_t index = packed[i] & kIndexMask;
        const std::uint32_t odd = index == 0 ? 0 : (index < 3 ? 3 : index | 1);
        packed[i] = static_cast<std::uint8_t>((packed[i] & ~kIndexMask) | (odd & ~1u) | ((scale_bits >> i) & 1));
    }
}

}  // namespace
}  // namespace torch_offload
