#include "codec/fixed_point.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/check.h"
#include "codec/token_planes.h"

namespace torch_offload {
namespace {

constexpr std::int32_t kMaxInteger = 1 << 30;

/// All within 2 of a power of two or of half a digit, and some at random.
std::vector<std::int32_t> hard_integers() {
    std::vector<std::int32_t> integers = {0};
    const auto add = [&](std::int64_t integer) {
        for (const std::int64_t signed_one : {integer, -integer}) {
            if (std::abs(signed_one) <= kMaxInteger) integers.push_back(static_cast<std::int32_t>(signed_one));
        }
    };
    for (unsigned bit = 0; bit <= 30; ++bit) {
        for (std::int64_t off = -2; off <= 2; ++off) {
            add((std::int64_t{1} << bit) + off);
            add((std::int64_t{1} << bit) + 128 + off);
            add((std::int64_t{1} << bit) + 0x8080 + off);
            add((std::int64_t{1} << bit) - 0x7F80 + off);
        }
    }
    std::mt19937 random(1);
    for (int i = 0; i < 100000; ++i) integers.push_back(static_cast<std::int32_t>(random() >> 1) - kMaxInteger);
    return integers;
}

// Digits make up their integer again, also where one borrows from the next. Method: integers around powers of two and
// halves of digits, and random ones; for fewer planes those that they are meant for.
TEST(FixedPoint, DigitsMakeUpIntegers) {
    for (const std::int32_t integer : hard_integers()) {
        for (unsigned planes = 1; planes <= kMaxPlanes; ++planes) {
            if (std::abs(integer) > 1 << (8 * planes - 2)) continue;
            std::int64_t sum = 0;
            for (unsigned plane = 0; plane < planes; ++plane) {
                sum += std::int64_t{plane_of(integer, plane)} * (std::int64_t{1} << 8 * plane);
            }
            ASSERT_EQ(sum, integer) << planes << " planes";
        }
    }
    EXPECT_EQ(plane_of(127, 0), 127);
    EXPECT_EQ(plane_of(128, 0), -128);
    EXPECT_EQ(plane_of(128, 1), 1);
    EXPECT_EQ(plane_of(-129, 0), 127);
    EXPECT_EQ(plane_of(-129, 1), -1);
    EXPECT_EQ(plane_of(kMaxInteger, 3), 64);
    EXPECT_EQ(plane_of(-kMaxInteger, 3), -64);
}

// A power of two multiplies as std::ldexp does, rounded once. Method: every exponent, what overflows and what becomes
// less than a normal float included; numbers that are at least one, as sums are.
TEST(FixedPoint, PowersOfTwo) {
    for (int exponent = -252; exponent <= 254; ++exponent) {
        for (const float value : {1.0F, -1.75F, 3.0e9F, 16777215.0F, 0.0F}) {
            const float expected = static_cast<float>(std::ldexp(double{value}, exponent));
            EXPECT_EQ(std::bit_cast<std::uint32_t>(PowerOfTwo(exponent).times(value)),
                      std::bit_cast<std::uint32_t>(expected))
                << value << " 2^" << exponent;
        }
    }
}

TokenPanel panel_of_one(const std::vector<float>& values) {
    TokenPanel panel(1, values.size());
    panel.fill(values.data());
    return panel;
}

std::int64_t integer_of(const TokenPlanes& planes, std::size_t index) {
    std::int64_t integer = 0;
    for (unsigned plane = 0; plane < planes.planes(); ++plane) {
        integer += std::int64_t{planes.plane(0, plane)[index]} * (std::int64_t{1} << 8 * plane);
    }
    return integer;
}

std::vector<InstructionSet> sets() {
    std::vector<InstructionSet> available;
    for (const auto set : {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512}) {
        if (is_available(set)) available.push_back(set);
    }
    return available;
}

// The integers of a token are rounded to the nearest, ties to even. Method: three planes and a largest value just below
// 2^22, which keeps a unit of one; ties below and above, of both signs; what rounds up to the power itself.
TEST(FixedPoint, RoundsTiesToEven) {
    const std::vector<float> values = {4194303.5F, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 0.49F, 0.51F, -0.0F, 1e-30F};
    const std::vector<std::int64_t> expected = {4194304, 0, 2, 2, 0, -2, -2, 0, 1, 0, 0};
    for (const InstructionSet set : sets()) {
        const TokenPlanes planes(panel_of_one(values), kPlanesOfHalf, set);
        std::int64_t total = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
            EXPECT_EQ(integer_of(planes, i), expected[i]) << values[i];
            total += expected[i];
        }
        EXPECT_EQ(planes.token(0).total, total);
        EXPECT_EQ(planes.token(0).point.of_sum(12345), 12345.0F);
        for (std::size_t i = values.size(); i < planes.stride(); ++i) EXPECT_EQ(integer_of(planes, i), 0);
    }
}

// The largest value of a token has all the bits there are, whatever its magnitude, and its sum is itself. Method: every
// exponent of a float, subnormal ones and the largest float included; a mantissa of ones; all planes.
TEST(FixedPoint, KeepsTheLargestValue) {
    for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
        for (const std::uint32_t mantissa : {0U, 1U, 0x400001U, 0x7FFFFFU}) {
            const auto largest = std::bit_cast<float>(exponent << 23 | mantissa);
            for (const InstructionSet set : sets()) {
                const TokenPlanes planes(panel_of_one({-largest, largest / 2}), kPlanesOfFloat, set);
                EXPECT_EQ(planes.token(0).point.of_sum(integer_of(planes, 0)), -largest);
                EXPECT_EQ(planes.token(0).point.of_sum(integer_of(planes, 1)), largest / 2);
            }
        }
    }
}

// A token that is not finite has no integers, and every sum of it is the same not-a-number. Method: infinities and
// not-a-numbers beside ordinary values.
TEST(FixedPoint, KeepsWhatIsNotFinite) {
    for (const float odd : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0xFF800001U)}) {
        for (const InstructionSet set : sets()) {
            const TokenPlanes planes(panel_of_one({1, odd, 3}), kPlanesOfFloat, set);
            EXPECT_FALSE(planes.token(0).point.is_finite());
            EXPECT_EQ(planes.token(0).total, 0);
            for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(integer_of(planes, i), 0);
            EXPECT_EQ(std::bit_cast<std::uint32_t>(planes.token(0).point.of_sum(0)), 0x7FC00000U);
        }
    }
}

// A number of planes that there is not is refused.
TEST(FixedPoint, RefusesOtherPlanes) {
    const TokenPanel panel(1, 5);
    EXPECT_THROW(TokenPlanes(panel, 0), InvalidArgument);
    EXPECT_THROW(TokenPlanes(panel, kMaxPlanes + 1), InvalidArgument);
}

}  // namespace
}  // namespace torch_offload
