#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "codec/defined_product.h"
#include "codec/host_kernels.h"
#include "codec/kernel_samples.h"

namespace torch_offload {
namespace {

struct Shape {
    std::size_t rows, columns, rows_per_tile;
};
constexpr Shape kShapes[] = {{1, 1, 1},     {1, 77, 1},     {70, 1, 64},    {3, 15, 2},    {9, 16, 9},
                             {67, 130, 64}, {40, 1100, 20}, {150, 513, 70}, {33, 1024, 33}};

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
    std::vector<std::uint32_t> bits;
    for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
    return bits;
}

ExtentBuffer coded(const Matrix& matrix, CoderChoice coder, std::size_t rows_per_tile, bool is_sorted = false) {
    EncodeOptions options{.coder = coder, .rows_per_tile = rows_per_tile};
    if (matrix.columns > 20) options.classes.push_back({20});
    if (matrix.columns > 100) options.classes.push_back({99});
    if (is_sorted) sort_columns(matrix, 3, options);
    return encode(matrix.view(), options);
}

class KernelProduct : public testing::TestWithParam<CoderChoice> {
protected:
    /// Both products have the bits of the definition.
    static void expect_bits(const Matrix& matrix, KernelSample& sample, DefinedProduct forward, DefinedProduct back,
                            const std::string& what) {
        const CodedMatrix opened(sample.extent());
        const std::vector<std::uint32_t> order = opened.column_order();
        const KernelMatrix placed = sample.matrix();
        std::vector<std::uint32_t> words = quad_words_of(placed);
        const QuadRows rows{words.data(), quad_row_words(matrix.columns)};
        const auto y = forward.expected(
            [&](std::size_t row, std::size_t column) { return matrix.values[row * matrix.columns + column]; });
        const auto z = back.expected(
            [&](std::size_t column, std::size_t row) { return matrix.values[row * matrix.columns + column]; });
        for (const unsigned stride : {1U, 5U}) {
            const HostPlanes x(forward.tokens_from(order));
            multiply_quads(placed, rows, x.planes, forward.sums_to(), HostTensorWarp{{stride}});
            ASSERT_EQ(bits_of(forward.actual), bits_of(y)) << what << ", lanes by " << stride;
            const HostPlanes g(back.tokens_from());
            multiply_quads_transposed(placed, rows, g.planes, back.sums_to(order), HostTensorWarp{{stride}});
            ASSERT_EQ(bits_of(back.actual), bits_of(z)) << what << ", transposed, lanes by " << stride;
        }
    }
};

// Sums have the bits of the definition. Method: integers of 64 bits by plain loops; shapes around what words, slices,
// tiles and groups of tokens hold, columns sorted and not; tokens of 16 bits and of 32; lanes in two orders.
TEST_P(KernelProduct, HasTheBitsOfTheDefinition) {
    int sorted = 0;
    for (const Shape& shape : kShapes) {
        const bool is_sorted = shape.columns % 2 == 0;
        const Matrix matrix = is_sorted ? uneven_columns(shape.rows, shape.columns, shape.columns)
                                        : random_matrix(shape.rows, shape.columns, 0.7, shape.columns);
        KernelSample sample(coded(matrix, GetParam(), shape.rows_per_tile, is_sorted));
        sorted += sample.matrix().order != nullptr;
        for (const std::size_t tokens : {1, 8, 19}) {
            for (const TokenType type : {TokenType::bfloat16, TokenType::float32}) {
                expect_bits(matrix, sample, {tokens, shape.columns, shape.rows, type},
                            {tokens, shape.rows, shape.columns, type},
                            std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + ", " +
                                std::to_string(tokens) + " tokens");
            }
        }
    }
    EXPECT_GT(sorted, 0);
}

// Magnitudes of any size are summed as the definition says; a token with an infinity or a not-a-number has no other
// sums, and its neighbours have theirs. Method: subnormals, the greatest floats, one value far above the others, zeros.
TEST_P(KernelProduct, OfExtremeTokens) {
    const Matrix matrix = random_matrix(40, 130, 0.6, 5);
    KernelSample sample(coded(matrix, GetParam(), 32));
    DefinedProduct forward{9, 130, 40, TokenType::float32};
    DefinedProduct back{9, 40, 130, TokenType::bfloat16};
    for (DefinedProduct* one : {&forward, &back}) {
        const auto token = [&](std::size_t index) { return one->inputs.data() + index * one->from; };
        one->before.assign(one->from, 1.0F);
        for (std::size_t i = 0; i < one->from; ++i) {
            token(0)[i] = std::numeric_limits<float>::denorm_min() * static_cast<float>(i + 1);
            token(1)[i] = i % 3 == 0 ? std::numeric_limits<float>::max() : 1.0F;
            token(2)[i] = 0;
            token(5)[i] = std::numeric_limits<float>::min() * 3;
        }
        token(3)[1] = 1e30F;
        token(4)[0] = std::numeric_limits<float>::infinity();
        token(6)[one->from - 1] = std::numeric_limits<float>::quiet_NaN();
    }
    expect_bits(matrix, sample, forward, back, "extreme");
}

INSTANTIATE_TEST_SUITE_P(Coders, KernelProduct,
                         testing::Values(CoderChoice::tun12, CoderChoice::rans4, CoderChoice::smallest),
                         [](const auto& choice) { return name_of(choice.param); });

// Two bits become a byte, in the order that planes have. Method: every value in every place of a word.
TEST(KernelBytes, OfAWord) {
    for (unsigned i = 0; i < kValuesOfWord; ++i) {
        for (const std::uint32_t code : {1U, 3U}) {
            const LaneBytes bytes = bytes_of_word(code << 2 * i);
            for (unsigned word = 0; word < 4; ++word) {
                for (unsigned byte = 0; byte < 4; ++byte) {
                    const auto value = static_cast<std::int8_t>(bytes.of[word] >> 8 * byte);
                    EXPECT_EQ(value, row_of_byte(word, byte) != i ? 0 : code == 1 ? 1 : -1) << i;
                }
            }
        }
    }
}

}  // namespace
}  // namespace torch_offload
