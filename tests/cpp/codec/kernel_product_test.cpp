#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "codec/host_kernels.h"
#include "codec/kernel_samples.h"
#include "codec/mma_warp.h"
#include "codec/product.h"

namespace torch_offload {
namespace {

struct Shape {
    std::size_t rows, columns, rows_per_tile;
};
constexpr Shape kShapes[] = {{1, 1, 1}, {1, 77, 1}, {70, 1, 64}, {3, 15, 2}, {9, 16, 9}, {67, 130, 64}, {40, 1100, 20}};

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
    std::vector<std::uint32_t> bits;
    for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
    return bits;
}

/// Inputs, scales on both sides and the result of a product with the portable kernels.
struct Case {
    std::size_t tokens;
    std::size_t from_width;
    std::size_t to_width;
    std::vector<float> inputs = uneven_floats(tokens * from_width, 1);
    std::vector<float> before = uneven_floats(from_width, 2);
    std::vector<float> after = uneven_floats(to_width, 3);
    std::vector<float> actual = std::vector<float>(tokens * to_width, 55.0F);
    std::vector<std::uint32_t> from_order = {};
    std::vector<std::uint32_t> to_order = {};

    ScaledTokens from() const {
        return {inputs.data(), before.data(), pointer_to(from_order), static_cast<std::uint32_t>(tokens),
                static_cast<std::uint32_t>(from_width)};
    }
    ScaledSums to() {
        return {actual.data(), after.data(), pointer_to(to_order), static_cast<std::uint32_t>(tokens),
                static_cast<std::uint32_t>(to_width)};
    }
    template <typename Multiply>
    std::vector<float> expected(Multiply multiply) const {
        TokenPanel in(tokens, from_width);
        in.fill(inputs.data(), before.data(), from_order);
        TokenPanel out(tokens, to_width);
        multiply(in, out);
        std::vector<float> values(tokens * to_width);
        out.write(values.data(), after.data(), to_order);
        return values;
    }
    static const std::uint32_t* pointer_to(const std::vector<std::uint32_t>& order) {
        return order.empty() ? nullptr : order.data();
    }
};

ExtentBuffer coded(const Matrix& matrix, CoderChoice coder, std::size_t rows_per_tile, bool is_sorted = false) {
    EncodeOptions options{.coder = coder, .rows_per_tile = rows_per_tile};
    if (matrix.columns > 20) options.classes.push_back({20});
    if (matrix.columns > 100) options.classes.push_back({99});
    if (is_sorted) sort_columns(matrix, 3, options);
    return encode(matrix.view(), options);
}

template <unsigned kTokens>
void expect_codewords_give_portable_sums(std::size_t tokens) {
    for (const Shape& shape : kShapes) {
        for (const double zero : {0.5, 0.885, 0.99}) {
            const bool is_sorted = zero == 0.5;
            const Matrix matrix = is_sorted ? uneven_columns(shape.rows, shape.columns, shape.columns)
                                            : random_matrix(shape.rows, shape.columns, zero, shape.columns);
            KernelSample sample(coded(matrix, CoderChoice::tun12, shape.rows_per_tile, is_sorted));
            const CodedMatrix opened(sample.extent());
            Case one{tokens, shape.columns, shape.rows};
            one.from_order = opened.column_order();
            const auto expected = one.expected(
                [&](const TokenPanel& x, TokenPanel& y) { multiply(opened, x, y, InstructionSet::portable); });
            for (const unsigned stride : {1U, 5U}) {
                multiply_codewords<kTokens>(sample.matrix(), one.from(), one.to(), HostWarp{stride});
                ASSERT_EQ(bits_of(one.actual), bits_of(expected))
                    << shape.rows << " x " << shape.columns << ", zeros " << zero << ", lanes by " << stride;
            }
        }
    }
}

// Sums made of codewords have the bits of the portable product. Method: shapes around what words, windows and tiles
// hold, several classes, short and long words; groups that are full and not; lanes in two orders.
TEST(KernelProduct, OfCodewordsHasPortableBits) {
    expect_codewords_give_portable_sums<1>(1);
    expect_codewords_give_portable_sums<2>(2);
    expect_codewords_give_portable_sums<4>(3);
    expect_codewords_give_portable_sums<8>(8);
}

class KernelProductOfQuads : public testing::TestWithParam<CoderChoice> {};

// Products of decoded rows, forward and transposed, have the bits of the portable ones, infinities included. Method: as
// above, with more tokens than a group has; then an input that is infinite.
TEST_P(KernelProductOfQuads, HasPortableBits) {
    int sorted = 0;
    for (const Shape& shape : kShapes) {
        const bool is_sorted = shape.columns % 2 == 0;
        const Matrix matrix = is_sorted ? uneven_columns(shape.rows, shape.columns, shape.columns)
                                        : random_matrix(shape.rows, shape.columns, 0.7, shape.columns);
        KernelSample sample(coded(matrix, GetParam(), shape.rows_per_tile, is_sorted));
        const CodedMatrix opened(sample.extent());
        const std::vector<std::uint32_t> order = opened.column_order();
        sorted += !order.empty();
        std::vector<std::uint32_t> words = quad_words_of(sample.matrix());
        const QuadRows rows{words.data(), quad_row_words(shape.columns)};
        for (const bool is_finite : {true, false}) {
            Case forward{11, shape.columns, shape.rows};
            forward.from_order = order;
            if (!is_finite) forward.inputs[shape.columns / 2] = std::numeric_limits<float>::infinity();
            const auto y = forward.expected(
                [&](const TokenPanel& from, TokenPanel& to) { multiply(opened, from, to, InstructionSet::portable); });
            multiply_quads<4, 8>(sample.matrix(), rows, forward.from(), forward.to(), HostWarp{3});
            for (std::size_t i = 0; i < y.size(); ++i) {
                ASSERT_TRUE(std::bit_cast<std::uint32_t>(forward.actual[i]) == std::bit_cast<std::uint32_t>(y[i]) ||
                            (std::isnan(y[i]) && std::isnan(forward.actual[i])))
                    << shape.rows << " x " << shape.columns << " at " << i;
            }
        }
        Case alone{1, shape.columns, shape.rows};
        alone.from_order = order;
        const auto y = alone.expected(
            [&](const TokenPanel& from, TokenPanel& to) { multiply(opened, from, to, InstructionSet::portable); });
        multiply_quads<2, 1>(sample.matrix(), rows, alone.from(), alone.to(), HostWarp{3});
        EXPECT_EQ(bits_of(alone.actual), bits_of(y)) << shape.rows << " x " << shape.columns;
        Case back{11, shape.rows, shape.columns};
        back.to_order = order;
        const auto z = back.expected([&](const TokenPanel& from, TokenPanel& to) {
            multiply_transposed(opened, from, to, InstructionSet::portable);
        });
        multiply_quads_transposed<8>(sample.matrix(), rows, back.from(), back.to());
        EXPECT_EQ(bits_of(back.actual), bits_of(z)) << shape.rows << " x " << shape.columns;
    }
    EXPECT_GT(sorted, 0);
}

INSTANTIATE_TEST_SUITE_P(Coders, KernelProductOfQuads,
                         testing::Values(CoderChoice::tun12, CoderChoice::rans4, CoderChoice::smallest),
                         [](const auto& choice) { return name_of(choice.param); });

/// mma.m16n8k16 on bfloat16 as the manual of PTX lays its operands out, with sums in double order of K.
struct HostTensorWarp : HostWarp {
    template <unsigned kTiles>
    void multiply_add(const PerLane<MmaRowsOperand>& left, const PerLane<MmaTokensOperand>& right,
                      PerLane<MmaSums<kTiles>>& sums, unsigned tile) const {
        float a[16][16];
        float b[16][8];
        const auto half = [](std::uint32_t pair, unsigned i) {
            return from_bfloat16(static_cast<std::uint16_t>(pair >> 16 * i));
        };
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
            for (unsigned i = 0; i < 8; ++i) {
                const unsigned row = lane / 4 + i / 2 % 2 * 8;
                const unsigned k = lane % 4 * 2 + i % 2 + i / 4 * 8;
                a[row][k] = half(left[lane].of[i / 2], i % 2);
            }
            for (unsigned i = 0; i < 4; ++i) {
                b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = half(right[lane].of[i / 2], i % 2);
            }
        }
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
            for (unsigned i = 0; i < 4; ++i) {
                double sum = sums[lane].of[tile][i];
                for (unsigned k = 0; k < 16; ++k) {
                    sum += static_cast<double>(a[lane / 4 + i / 2 * 8][k]) * b[k][lane % 4 * 2 + i % 2];
                }
                sums[lane].of[tile][i] = static_cast<float>(sum);
            }
        }
    }
};

// Operands for tensor cores meet the right tokens, and two bfloat16 keep 16 bits of each. Method: the instruction
// emulated as its manual says; whole numbers, whose sums are exact, then any floats to 2^-15 of the sum of magnitudes.
TEST(KernelProduct, OnTensorCores) {
    constexpr unsigned kTiles = 2;
    for (const Shape& shape : kShapes) {
        const Matrix matrix = random_matrix(shape.rows, shape.columns, 0.6, shape.rows);
        const KernelSample sample(coded(matrix, CoderChoice::smallest, shape.rows_per_tile));
        std::vector<std::uint32_t> words = quad_words_of(sample.matrix());
        const QuadRows rows{words.data(), quad_row_words(shape.columns)};
        const std::size_t stride = quad_row_words(shape.columns) * kValuesOfWord;
        for (const bool is_whole : {true, false}) {
            std::vector<float> x = uneven_floats(kTiles * kMmaTokens * shape.columns, 9);
            if (is_whole) {
                for (float& value : x) value = std::nearbyint(std::fmod(value, 1000.0F));
            }
            std::vector<std::uint16_t> high(kTiles * kMmaTokens * stride), low(high.size());
            const SplitPanel panel{high.data(), low.data(), stride};
            for (std::size_t i = 0; i < x.size(); ++i) {
                write_split(panel, i / shape.columns * stride + i % shape.columns, x[i]);
            }
            for (std::uint32_t row = 0; row < shape.rows; row += kMmaRows) {
                HostWarp::PerLane<MmaSums<kTiles>> sums;
                for (std::uint32_t block = 0; block < stride / kMmaColumns; ++block) {
                    add_mma_block<kTiles>(HostTensorWarp{}, sample.matrix(), rows, row, panel, 0, block, sums);
                }
                for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
                    for_mma_sums(lane, sums[lane], [&](unsigned r, unsigned token, float actual) {
                        if (row + r >= shape.rows) return;
                        double expected = 0;
                        double magnitude = 0;
                        for (std::size_t c = 0; c < shape.columns; ++c) {
                            const double term =
                                double{x[token * shape.columns + c]} * matrix.values[(row + r) * shape.columns + c];
                            expected += term;
                            magnitude += std::abs(term);
                        }
                        ASSERT_NEAR(actual, expected, is_whole ? 0 : magnitude / 32768) << shape.columns;
                    });
                }
            }
        }
    }
}

// A pair of values of T is a pair of bfloat16. Method: all nine.
TEST(KernelProduct, PairsOfBfloat16) {
    constexpr std::array<std::uint32_t, 3> kTwo = {0, 1, 3};
    constexpr std::array<float, 3> kValue = {0, 1, -1};
    for (std::size_t i = 0; i < 9; ++i) {
        const std::uint32_t pair = mma_pair(kTwo[i % 3] | kTwo[i / 3] << 2);
        EXPECT_EQ(from_bfloat16(static_cast<std::uint16_t>(pair)), kValue[i % 3]);
        EXPECT_EQ(from_bfloat16(static_cast<std::uint16_t>(pair >> 16)), kValue[i / 3]);
    }
}

// Splitting keeps what is not finite as it is. Method: an infinity, a not-a-number, the largest float.
TEST(KernelProduct, SplitsWhatIsNotFinite) {
    std::uint16_t high[3] = {};
    std::uint16_t low[3] = {7, 7, 7};
    const SplitPanel panel{high, low, 64};
    write_split(panel, 0, std::numeric_limits<float>::infinity());
    write_split(panel, 1, std::numeric_limits<float>::quiet_NaN());
    write_split(panel, 2, std::numeric_limits<float>::max());
    EXPECT_TRUE(std::isinf(from_bfloat16(high[0])));
    EXPECT_TRUE(std::isnan(from_bfloat16(high[1])));
    for (const std::uint16_t rest : low) EXPECT_EQ(rest, 0);
}

}  // namespace
}  // namespace torch_offload
