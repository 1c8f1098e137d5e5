// Tokens as integers, so that their sums with T are exact: equal bits in any order, on any processor, for any count of
// tokens beside them. Layer codec: includes base only.
//
// A token's floats v become fixed-point numbers q of 8 `planes` - 2 bits below the token's magnitude: with 2^e the
// least power of two above all |v|, q is v 2^(8 planes - 2 - e), rounded to the nearest integer, of two the even one.
// As digits to the base of 256 from -128 to 127 they are the bytes of the planes, the lowest first. A sum S of q times
// values of T is an integer, and what it stands for float(S) 2^(e - 8 planes + 2), rounded to the nearest float.
//
// Three planes are for tokens of 16 bits: what is lost of a value is at most 2^-22 of the token's largest. Four are for
// float32: at most 2^-30. A token with an infinity or a not-a-number has sums that are all not-a-number.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace torch_offload {

inline constexpr unsigned kMaxPlanes = 4;
inline constexpr unsigned kPlanesOfHalf = 3;   // tokens of 16 bits
inline constexpr unsigned kPlanesOfFloat = 4;  // of 32

/// The bits of |value|: ordered as magnitudes are, those of infinities and not-a-numbers last.
OFFLOAD_HOST_DEVICE inline std::uint32_t magnitude_bits(float value) noexcept {
    return __builtin_bit_cast(std::uint32_t, value) & 0x7FFFFFFFU;
}

/// 2^exponent as two factors, so that it may be less or more than a float can be. Pre: within -252 and 254.
struct PowerOfTwo {
    float first;
    float second;

    OFFLOAD_HOST_DEVICE explicit PowerOfTwo(int exponent) noexcept
        : first(power(exponent / 2)), second(power(exponent - exponent / 2)) {}

    /// Rounded once.
    OFFLOAD_HOST_DEVICE float times(float value) const noexcept { return value * first * second; }

private:
    OFFLOAD_HOST_DEVICE static float power(int exponent) noexcept {
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(exponent + 127) << 23);
    }
};

/// How a token's floats become integers and its sums floats again.
class FixedPoint {
public:
    /// `most_bits`: the greatest magnitude_bits() of the token's values.
    OFFLOAD_HOST_DEVICE FixedPoint(std::uint32_t most_bits, unsigned planes) noexcept
        : is_finite_(most_bits < 0x7F800000U),
          shift_(8 * static_cast<int>(planes) - 2 - (static_cast<int>(most_bits >> 23) - 126)) {}

    OFFLOAD_HOST_DEVICE bool is_finite() const noexcept { return is_finite_; }
    /// What a value is multiplied by before it is rounded; exact unless the result is nothing beside one half.
    OFFLOAD_HOST_DEVICE PowerOfTwo to_integers() const noexcept { return PowerOfTwo(is_finite_ ? shift_ : 0); }
    /// What a sum is worth.
    OFFLOAD_HOST_DEVICE float of_sum(std::int64_t sum) const noexcept {
        if (!is_finite_) return __builtin_bit_cast(float, 0x7FC00000U);
        return PowerOfTwo(-shift_).times(static_cast<float>(sum));
    }

private:
    bool is_finite_;
    int shift_;
};

/// Digit `plane` of an integer, from -128 to 127. Pre: |integer| is at most 2^30, `plane` less than kMaxPlanes.
OFFLOAD_HOST_DEVICE constexpr std::int8_t plane_of(std::int32_t integer, unsigned plane) noexcept {
    // A digit from 128 on borrows from the next one: half a digit is added to each below, so that it is carried there.
    const std::uint32_t halves_below = 0x808080U & ((1U << 8 * plane) - 1);
    return static_cast<std::int8_t>((static_cast<std::uint32_t>(integer) + halves_below) >> 8 * plane);
}

}  // namespace torch_offload
