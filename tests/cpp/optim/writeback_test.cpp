#include "optim/writeback.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/split_master.h"
#include "optim/writeback_block.h"

namespace torch_offload {
namespace {

/// A gradient, where it goes to, and the sums of its chunks.
struct Departing {
    WritebackArrays arrays;
    std::vector<std::uint8_t> from, to;
    std::vector<WritebackSum> sums;
    WritebackSum total;

    Departing(const std::vector<float>& values, GradientType type, GradientType to_type)
        : from(values.size() * bytes_each(type)),
          to(values.size() * bytes_each(to_type), 0xAB),
          sums(writeback_chunks(values.size())) {
        for (std::size_t i = 0; i < values.size(); ++i) {
            const auto bits = std::bit_cast<std::uint32_t>(values[i]) >> (type == GradientType::bf16 ? 16 : 0);
            std::memcpy(from.data() + i * bytes_each(type), &bits, bytes_each(type));
        }
        arrays = {values.size(), from.data(), type, to.data(), to_type};
    }
    Departing(Departing&&) = delete;

    static std::size_t bytes_each(GradientType type) { return type == GradientType::bf16 ? 2 : 4; }

    std::string bytes() const {
        std::string all(to.begin(), to.end());
        const auto add = [&](const WritebackSum& sum) {
            all += std::to_string(std::bit_cast<std::uint64_t>(sum.squares)) + "," +
                   std::to_string(sum.nonfinite_count) + ";";
        };
        for (const WritebackSum& sum : sums) add(sum);
        add(total);
        return all;
    }

    void run(InstructionSet set) {
        write_back_gradients(arrays, sums.data(), set);
        total = total_writeback(sums.data(), sums.size());
    }
    /// As CUDA does it with this many blocks, whose threads happen to run in this order.
    void run_as_blocks(std::size_t blocks, HostTeam team, bool is_aligned) {
        WritebackShared shared;
        for (std::size_t block = 0; block < blocks; ++block) {
            write_back_chunks(team, arrays, is_aligned, block, blocks, shared, sums.data());
        }
        total_chunks(team, sums.data(), sums.size(), shared, &total);
    }
};

constexpr std::size_t kCounts[] = {
    0, 1, 7, 8, 9, 2047, 2049, kWritebackChunk, kWritebackChunk + 1, 4 * kWritebackChunk + 3};

/// Of many magnitudes, so that every other order of the sum gives other bits.
std::vector<float> some_values(std::size_t count, std::uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % 40) - 20);
    return values;
}

std::vector<float> with_special(std::vector<float> values, float special) {
    if (!values.empty()) values[values.size() * 2 / 3] = special;
    return values;
}

/// Squares and sums as writeback.h says, one addition after the other.
WritebackSum formula(const std::vector<float>& values) {
    std::vector<double> lanes(kTeamLanes);
    for (std::size_t chunk = 0; chunk < writeback_chunks(values.size()); ++chunk) {
        std::vector<double> sums(kWritebackRow);
        for (std::size_t i = 0; i < kWritebackChunk; ++i) {
            const std::size_t element = chunk * kWritebackChunk + i;
            if (element < values.size()) sums[i % kWritebackRow] += std::pow(static_cast<double>(values[element]), 2);
        }
        for (const std::size_t distance : {4, 2, 1, 1024, 512, 256, 128, 64, 32, 16, 8}) {
            for (std::size_t i = 0; i + distance < sums.size(); ++i) {
                const bool is_left = distance < kGroup ? i % kGroup < distance : i < distance;
                if (is_left) sums[i] += sums[i + distance];
            }
        }
        lanes[chunk % kTeamLanes] += sums[0];
    }
    for (std::size_t half = kTeamLanes / 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return {lanes[0], 0};
}

class Writeback : public testing::TestWithParam<InstructionSet> {
protected:
    void SetUp() override {
        // The portable kernel, which the others are compared with, runs everywhere.
        if (!is_available(GetParam())) GTEST_SKIP() << "this processor has no such instructions";
    }
};

// The sum is added up in the documented order, at every length around a group, a row and a chunk. Method: the order
// written down once more, number by number.
TEST_P(Writeback, SumsInTheDocumentedOrder) {
    for (const std::size_t count : kCounts) {
        const std::vector<float> values = some_values(count);
        Departing written(values, GradientType::f32, GradientType::f32);
        written.run(GetParam());
        EXPECT_EQ(std::bit_cast<std::uint64_t>(written.total.squares),
                  std::bit_cast<std::uint64_t>(formula(values).squares))
            << count;
        EXPECT_EQ(written.total.nonfinite_count, 0U);
    }
}

// Bytes and sums are those of the CUDA kernel, whatever its number of blocks and the order of its threads. Method: the
// kernel's own functions in a loop over its threads; all types, numbers that are not finite, a wrong order would show
// (the values differ by 2^40).
TEST_P(Writeback, EqualsTheKernelOfCudaForEveryGrid) {
    for (const float special : {1.0F, -INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
        for (const GradientType type : {GradientType::bf16, GradientType::f32}) {
            for (const GradientType to_type : {GradientType::bf16, GradientType::f32}) {
                for (const std::size_t count : kCounts) {
                    const std::vector<float> values = with_special(some_values(count), special);
                    Departing expected(values, type, to_type);
                    expected.run(GetParam());
                    std::size_t lane_stride = 1;
                    for (const std::size_t blocks : {1, 3, 64}) {
                        Departing actual(values, type, to_type);
                        actual.run_as_blocks(blocks, {lane_stride}, blocks != 3);
                        ASSERT_EQ(actual.bytes(), expected.bytes()) << count << " in " << blocks;
                        lane_stride += 74;
                    }
                }
            }
        }
    }
}

// Every cast is torch's: bf16 widens exactly, fp32 rounds to nearest with ties to even, and not-a-numbers stay so.
// Method: bits on either side of ties.
TEST_P(Writeback, CastsAsTorchDoes) {
    const auto cast = [](std::uint32_t bits) {
        Departing written({std::bit_cast<float>(bits)}, GradientType::f32, GradientType::bf16);
        written.run(GetParam());
        return written.to[0] | written.to[1] << 8;
    };
    EXPECT_EQ(cast(0x3F808000), 0x3F80);
    EXPECT_EQ(cast(0x3F808001), 0x3F81);
    EXPECT_EQ(cast(0x3F818000), 0x3F82);
    EXPECT_EQ(cast(0x7F7FFFFF), 0x7F80);
    EXPECT_EQ(cast(0xFF800001), 0x7FC0);
    EXPECT_EQ(cast(0x80000001), 0x8000);
}

// What is not finite is counted, and the sum says which: inf for infinities, one not-a-number otherwise. Squares that
// fp32 cannot hold are held. Method: single elements in a gradient of several chunks.
TEST_P(Writeback, CountsWhatIsNotFinite) {
    std::vector<float> values(3 * kWritebackChunk, 0.0F);
    const auto total = [&] {
        Departing written(values, GradientType::f32, GradientType::bf16);
        written.run(GetParam());
        return written.total;
    };
    values[5] = std::numeric_limits<float>::max();
    values[6] = std::numeric_limits<float>::denorm_min();
    EXPECT_EQ(total().squares, std::pow(static_cast<double>(values[5]), 2));
    EXPECT_EQ(total().nonfinite_count, 0U);
    values[2 * kWritebackChunk + 1] = -INFINITY;
    values[kWritebackChunk] = INFINITY;
    EXPECT_EQ(total().squares, INFINITY);
    EXPECT_EQ(total().nonfinite_count, 2U);
    values[7] = std::bit_cast<float>(0xFFFFFFFFU);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(total().squares), std::uint64_t{0x7FF8} << 48);
    EXPECT_EQ(total().nonfinite_count, 3U);
}

// A gradient may leave from where it lies, and be only looked at. Method: one array for both ends; none for the other.
TEST_P(Writeback, NeedsNoSecondArray) {
    const std::vector<float> values = some_values(5000);
    Departing expected(values, GradientType::f32, GradientType::f32);
    expected.run(GetParam());
    for (const bool is_in_place : {true, false}) {
        Departing actual(values, GradientType::f32, GradientType::f32);
        actual.arrays.to = is_in_place ? actual.from.data() : nullptr;
        const std::vector<std::uint8_t> before = actual.from;
        actual.run(GetParam());
        EXPECT_EQ(actual.total.squares, expected.total.squares);
        EXPECT_EQ(actual.from, before);
    }
}

// Of more chunks than a team has lanes, each lane takes several in order. Method: the order written down once more.
TEST(WritebackTotal, TakesChunksInTurn) {
    const std::vector<float> values = some_values(3 * kTeamLanes + 5);
    std::vector<WritebackSum> sums;
    std::vector<double> lanes(kTeamLanes);
    for (const float value : values) {
        lanes[sums.size() % kTeamLanes] += std::abs(value);
        sums.push_back({std::abs(value), 1});
    }
    for (std::size_t half = kTeamLanes / 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    const WritebackSum total = total_writeback(sums.data(), sums.size());
    EXPECT_EQ(total.squares, lanes[0]);
    EXPECT_EQ(total.nonfinite_count, sums.size());
}

std::string name_of(const testing::TestParamInfo<InstructionSet>& set) {
    constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
    return kNames[static_cast<std::size_t>(set.param)];
}

INSTANTIATE_TEST_SUITE_P(All, Writeback,
                         testing::Values(InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512),
                         name_of);

}  // namespace
}  // namespace torch_offload
