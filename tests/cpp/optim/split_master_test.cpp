#include "optim/split_master.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace torch_offload {
namespace {

float value_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
float weight_of(std::uint32_t master) {
    return value_of(static_cast<std::uint32_t>(split_master(master).weight) << 16);
}

// Halves give back the master they came from: all 2^32 bit patterns, not-a-numbers as the canonical one.
// Method: exhaustive.
TEST(SplitMaster, EveryMasterComesBack) {
    std::uint64_t wrong = 0;
    for (std::uint64_t pattern = 0; pattern <= UINT32_MAX; ++pattern) {
        const auto bits = static_cast<std::uint32_t>(pattern);
        wrong += join_master(split_master(bits)) != with_canonical_nan(bits) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0u);
}

// Every pair of halves is the split of the master it stands for, so a weight that changes under its low half still is
// the rounding of the master. Exempt are pairs that stand for a not-a-number. Method: exhaustive.
TEST(SplitMaster, EveryPairOfHalvesIsASplit) {
    std::uint64_t wrong = 0;
    for (std::uint64_t pattern = 0; pattern <= UINT32_MAX; ++pattern) {
        const SplitMaster halves{static_cast<std::uint16_t>(pattern >> 16), static_cast<std::int16_t>(pattern)};
        const std::uint32_t master = join_master(halves);
        const SplitMaster again = split_master(master);
        const bool is_same = again.weight == halves.weight && again.low == halves.low;
        wrong += is_same || is_nan_bits(master) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0u);
}

// The weight is a bf16 nearest to the master, the one of larger magnitude at a tie. Method: every master of some
// exponents, denormals and the largest ones included, against its neighbours below and above, in doubles.
TEST(SplitMaster, WeightIsTheNearest) {
    for (const std::uint32_t top : {0x0000u, 0x007Fu, 0x0080u, 0x3F7Fu, 0x3F80u, 0xBF81u, 0x7F7Eu, 0x807Fu}) {
        const double below = value_of(top << 16);
        const double above = value_of((top + 1) << 16);
        for (std::uint32_t low = 0; low <= 0xFFFF; ++low) {
            const std::uint32_t bits = (top << 16) + low;
            const double master = value_of(bits);
            const bool is_up = std::abs(above - master) <= std::abs(master - below);
            ASSERT_EQ(weight_of(bits), is_up ? above : below) << std::hex << bits;
        }
    }
}

// What is not finite stays what it is, and a master beyond the largest bf16 becomes infinite. Method: single values.
TEST(SplitMaster, ValuesThatAreNotFinite) {
    EXPECT_EQ(weight_of(0x7F800000), INFINITY);
    EXPECT_EQ(weight_of(0xFF800000), -INFINITY);
    EXPECT_EQ(weight_of(0x7F7F8000), INFINITY);
    EXPECT_EQ(weight_of(0xFF7FFFFF), -INFINITY);
    EXPECT_EQ(weight_of(0x7F7F7FFF), value_of(0x7F7F0000));
    for (const std::uint32_t nan : {0x7F800001u, 0x7FFF8000u, 0xFFFFFFFFu, 0xFF808000u}) {
        EXPECT_TRUE(std::isnan(weight_of(nan))) << std::hex << nan;
        EXPECT_EQ(join_master(split_master(nan)), kCanonicalNan);
    }
}

}  // namespace
}  // namespace torch_offload
