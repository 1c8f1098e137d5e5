#include "optim/packed_moments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace torch_offload {
namespace {

constexpr Moment kMoments[] = {Moment::first, Moment::second};

std::vector<double> levels_of(Moment moment) {
    if (moment == Moment::first) return {std::begin(kFirstLevels.values), std::end(kFirstLevels.values)};
    return {std::begin(kSecondLevels.values), std::end(kSecondLevels.values)};
}

std::vector<std::uint8_t> packed(Moment moment, const std::vector<float>& values) {
    std::vector<std::uint8_t> bytes(packed_size(values.size()), 0xAB);
    pack_moment(moment, values.data(), values.size(), bytes.data());
    return bytes;
}

std::vector<float> unpacked(Moment moment, const std::vector<std::uint8_t>& bytes, std::size_t count) {
    std::vector<float> values(count);
    unpack_moment(moment, bytes.data(), count, values.data());
    return values;
}

/// Values of many magnitudes, as moments are; second moments are not negative.
std::vector<float> some_values(Moment moment, std::size_t count, float scale, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) {
        value = normal(random) * scale * std::pow(10.0F, -static_cast<float>(random() % 9));
        if (moment == Moment::second) value = std::abs(value);
    }
    return values;
}

// Levels rise from 0 to 1 as the formula says. Method: the formula in doubles, by the number of leading zeros.
TEST(PackedMoments, LevelsAreThoseOfTheFormula) {
    for (const Moment moment : kMoments) {
        const std::vector<double> levels = levels_of(moment);
        const int bits = moment == Moment::first ? 7 : 8;
        EXPECT_EQ(levels.front(), 0);
        EXPECT_EQ(levels.back(), 1);
        for (std::size_t k = 1; k < levels.size(); ++k) {
            const int i = static_cast<int>(std::log2(k));
            const double place = static_cast<double>(k - (std::size_t{1} << i) + 1) / (1 << i);
            EXPECT_NEAR(levels[k] / (std::pow(10.0, i - bits + 1) * (0.1 + 0.9 * place)), 1, 1e-6) << k;
            EXPECT_GT(levels[k], levels[k - 1]);
        }
    }
}

// A value becomes the nearest level of its block's scale, 0 below 0.55 of the lowest; in the first 32 elements the next
// odd index takes the place of an even one, and second moments that are not zero have at least the lowest level.
// Method: search through all levels, in doubles.
TEST(PackedMoments, ValuesBecomeTheNearestLevel) {
    for (const Moment moment : kMoments) {
        const std::vector<float> values = some_values(moment, kPackedBlock, 0.37F, 1);
        const std::vector<float> result = unpacked(moment, packed(moment, values), values.size());
        double scale = 0;
        for (const float value : values) scale = std::max<double>(scale, std::abs(value));
        const std::vector<double> levels = levels_of(moment);
        for (std::size_t i = 0; i < values.size(); ++i) {
            const double ratio = std::abs(values[i]) / scale;
            const auto nearest = std::min_element(levels.begin(), levels.end(), [&](double one, double other) {
                return std::abs(one - ratio) < std::abs(other - ratio);
            });
            auto index = static_cast<std::size_t>(nearest - levels.begin());
            if (index == 1 && ratio < 0.55 * levels[1]) index = 0;  // the place of 0.1 in the lowest decade
            if (moment == Moment::second) index = std::max<std::size_t>(index, 1);
            if (i < kScaleBits && index != 0) index = std::max<std::size_t>(index | 1, 3);
            ASSERT_NEAR(std::abs(result[i]) / scale, levels[index], 1e-6 * levels[index]) << i << ": " << ratio;
            ASSERT_EQ(std::signbit(result[i]), std::signbit(values[i])) << i;
        }
    }
}

// Packing what was unpacked gives the same bytes, at every level, place, length and size of the scale down to where
// the lowest levels are denormal. Method: blocks
// of all levels and random blocks, packed twice.
TEST(PackedMoments, PackingAgainChangesNothing) {
    for (const Moment moment : kMoments) {
        for (const float scale : {1.0F, 3.7e-5F, 8.1e12F, 1e-30F, std::numeric_limits<float>::max()}) {
            std::vector<float> all(kScaleBits, 0.0F);
            for (const double level : levels_of(moment)) all.push_back(static_cast<float>(level) * scale);
            EXPECT_EQ(packed(moment, unpacked(moment, packed(moment, all), all.size())), packed(moment, all)) << scale;
            for (const std::size_t count : {1, 2, 31, 32, 33, 100, 2047, 2048, 2049, 5000}) {
                std::vector<float> values = some_values(moment, count, std::min(scale, 1e30F), 7);
                values[count / 2] = scale;
                const std::vector<std::uint8_t> once = packed(moment, values);
                EXPECT_EQ(packed(moment, unpacked(moment, once, count)), once) << scale << " " << count;
            }
        }
    }
}

// The largest value of a block is kept to the bit, wherever it stands. Method: one large value among small ones.
TEST(PackedMoments, LargestValueIsExact) {
    for (const Moment moment : kMoments) {
        for (const std::size_t place : {0, 1, 31, 32, 1000, 2047}) {
            std::vector<float> values = some_values(moment, kPackedBlock, 0.01F, 3);
            values[place] = 12.345678F;
            EXPECT_EQ(unpacked(moment, packed(moment, values), values.size())[place], 12.345678F) << place;
        }
    }
}

// Zero bytes are zeros and zeros are zero bytes, so that new states need no memory. Method: both ways.
TEST(PackedMoments, ZerosAreZeroBytes) {
    for (const Moment moment : kMoments) {
        EXPECT_EQ(packed(moment, std::vector<float>(3000, 0.0F)), std::vector<std::uint8_t>(2 * kPackedBlock, 0));
        EXPECT_EQ(unpacked(moment, std::vector<std::uint8_t>(kPackedBlock, 0), 2000), std::vector<float>(2000, 0.0F));
    }
}

// A second moment that is not zero stays so: what is divided by its root would explode. Method: values far below the
// lowest level.
TEST(PackedMoments, SecondMomentsDoNotVanish) {
    std::vector<float> values(kPackedBlock, 1e-30F);
    values[5] = 1.0F;
    values[6] = values[600] = 0.0F;
    const std::vector<float> result = unpacked(Moment::second, packed(Moment::second, values), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(result[i] == 0, values[i] == 0) << i;
}

// One value that is not finite shows in its whole block and in no other. Method: three blocks, the middle one spoilt.
TEST(PackedMoments, BlocksWithInfinitiesAreNotNumbers) {
    for (const Moment moment : kMoments) {
        for (const float spoilt : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
            std::vector<float> values = some_values(moment, 3 * kPackedBlock, 1.0F, 9);
            values[kPackedBlock + 77] = spoilt;
            const std::vector<float> result = unpacked(moment, packed(moment, values), values.size());
            for (std::size_t i = 0; i < values.size(); ++i) {
                ASSERT_EQ(std::isnan(result[i]), i / kPackedBlock == 1) << i;
            }
        }
    }
}

}  // namespace
}  // namespace torch_offload
