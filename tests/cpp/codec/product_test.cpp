#include "codec/product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "base/check.h"
#include "codec/encode.h"
#include "codec/outcomes.h"
#include "codec/product_kernels.h"

namespace torch_offload {
namespace {

constexpr unsigned kPlaneCounts[] = {kPlanesOfHalf, kPlanesOfFloat};

class Product : public testing::TestWithParam<CoderChoice> {
protected:
    ExtentBuffer coded(const Matrix& matrix, std::size_t rows_per_tile, bool is_sorted = false) const {
        EncodeOptions options;
        options.coder = GetParam();
        options.rows_per_tile = rows_per_tile;
        if (matrix.columns > 20) options.classes.push_back({20});
        if (is_sorted) sort_columns(matrix, 3, options);
        return encode(matrix.view(), options);
    }
};

/// T x and T^T g by one set.
struct Sums {
    std::vector<std::uint32_t> y;
    std::vector<std::uint32_t> z;

    bool operator==(const Sums&) const = default;
};

Sums products(const CodedMatrix& coded, const TokenPanel& x, const TokenPanel& g, unsigned planes, InstructionSet set) {
    const std::vector<std::uint32_t> order = coded.column_order();
    const std::vector<float> ones(coded.columns(), 1.0F);
    std::vector<float> in_matrix(x.tokens() * coded.columns());
    TokenPanel in_order(x.tokens(), coded.columns());
    for (std::size_t t = 0; t < x.tokens(); ++t) {
        std::copy_n(x.token(t), coded.columns(), in_matrix.data() + t * coded.columns());
    }
    in_order.fill(in_matrix.data(), nullptr, order);
    TokenPanel y(x.tokens(), coded.rows());
    multiply(coded, TokenPlanes(in_order, planes, set), y, set);
    TokenPanel z(g.tokens(), coded.columns());
    z.token(0)[0] = 5;  // what was there does not matter
    multiply_transposed(coded, TokenPlanes(g, planes, set), z, set);
    z.write(in_matrix.data(), ones.data(), order);
    return {bits_of(y), bits_of(panel_of(in_matrix, g.tokens()))};
}

struct Shape {
    std::size_t rows, columns, tokens, rows_per_tile;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1},     {1, 77, 3, 1},     {70, 1, 2, 64},    {3, 15, 64, 2},   {9, 16, 5, 9},
                             {67, 130, 4, 64}, {130, 257, 1, 50}, {20, 500, 13, 20}, {65, 64, 8, 128}, {6, 1000, 2, 4},
                             {150, 63, 6, 70}, {33, 65, 7, 33},   {12, 1255, 9, 5},  {66, 128, 17, 66}};

// Products have the bits of the documented sums, by every coder and instruction set, of sorted columns too. Method: the
// definition written down once more, with whole numbers added one by one; shapes around what registers, rows at once
// and tiles hold.
TEST_P(Product, AreSumsOfIntegers) {
    std::uint32_t seed = 1;
    for (const Shape& shape : kShapes) {
        const bool is_sorted = ++seed % 2;
        const Matrix matrix = is_sorted ? uneven_columns(shape.rows, shape.columns, seed)
                                        : random_matrix(shape.rows, shape.columns, seed % 4 ? 0.9 : 0.6, seed);
        const ExtentBuffer extent = coded(matrix, shape.rows_per_tile, is_sorted);
        const CodedMatrix opened(extent.bytes());
        const TokenPanel x = panel_of(uneven_floats(shape.tokens * shape.columns, seed), shape.tokens);
        const TokenPanel g = panel_of(uneven_floats(shape.tokens * shape.rows, seed + 100), shape.tokens);
        for (const unsigned planes : kPlaneCounts) {
            const Sums expected{forward_formula(matrix, x, planes), transposed_formula(matrix, g, planes)};
            for (const InstructionSet set : available_sets()) {
                EXPECT_TRUE(products(opened, x, g, planes, set) == expected)
                    << shape.rows << " x " << shape.columns << " by " << static_cast<int>(set);
            }
        }
    }
}

// Tiles may be multiplied by several threads, and a token has the same bits among others as alone. Method: a thread per
// tile against one for all, forth and back, sums added from the last to the first; eleven tokens against each alone.
TEST_P(Product, DependsOnNeitherThreadsNorOtherTokens) {
    const Matrix matrix = random_matrix(150, 333, 0.9, 5);
    const ExtentBuffer extent = coded(matrix, 64);
    const CodedMatrix opened(extent.bytes());
    const TokenPanel x = panel_of(uneven_floats(11 * 333, 6), 11);
    const TokenPanel g = panel_of(uneven_floats(11 * 150, 7), 11);
    const Sums expected = products(opened, x, g, kPlanesOfFloat, best_instruction_set());
    const TokenPlanes x_planes(x, kPlanesOfFloat);
    const TokenPlanes g_planes(g, kPlanesOfFloat);
    TokenPanel y(11, 150);
    std::vector<ColumnSums> parts(opened.tiles().size(), ColumnSums(11, kPlanesOfFloat, 333));
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        threads.emplace_back([&, i] {
            multiply_tile(opened, opened.tiles()[i], x_planes, y);
            multiply_tile_transposed(opened, opened.tiles()[i], g_planes, parts[i]);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = parts.size(); --i > 0;) parts[i - 1].add(parts[i]);
    TokenPanel z(11, 333);
    parts[0].write(g_planes, z);
    EXPECT_TRUE((Sums{bits_of(y), bits_of(z)} == expected));
    for (std::size_t i = 0; i < 11; ++i) {
        const TokenPanel one = panel_of({x.token(i), x.token(i) + 333}, 1);
        TokenPanel alone(1, 150);
        multiply(opened, TokenPlanes(one, kPlanesOfFloat), alone);
        for (std::size_t row = 0; row < 150; ++row) EXPECT_EQ(alone.token(0)[row], y.token(i)[row]) << i;
    }
}

// Magnitudes change nothing: the smallest and the largest floats, one value that dwarfs the others, zeros alone, and
// what is not finite, whose neighbours keep their sums. Method: the definition, by every set.
TEST_P(Product, OfExtremeTokens) {
    const Matrix matrix = random_matrix(40, 131, 0.5, 9);
    const ExtentBuffer extent = coded(matrix, 16);
    const CodedMatrix opened(extent.bytes());
    constexpr std::size_t kTokens = 7;
    const auto extreme = [](std::size_t width) {
        std::vector<float> values = uneven_floats(kTokens * width, 3);
        for (std::size_t i = 0; i < width; ++i) {
            values[i] = std::ldexp(values[i], -140);
            values[width + i] = std::copysign(FLT_MAX, values[width + i]);
            values[3 * width + i] = i % 2 ? 0.0F : -0.0F;
        }
        values[2 * width + width / 2] = 1e30F;
        values[4 * width + width - 1] = std::numeric_limits<float>::infinity();
        values[5 * width] = std::numeric_limits<float>::quiet_NaN();
        return panel_of(values, kTokens);
    };
    const TokenPanel x = extreme(131);
    const TokenPanel g = extreme(40);
    for (const unsigned planes : kPlaneCounts) {
        const Sums expected{forward_formula(matrix, x, planes), transposed_formula(matrix, g, planes)};
        EXPECT_TRUE(std::isnan(std::bit_cast<float>(expected.y[4 * 40])));
        EXPECT_FALSE(std::isnan(std::bit_cast<float>(expected.y[6 * 40])));
        for (const InstructionSet set : available_sets()) {
            EXPECT_TRUE(products(opened, x, g, planes, set) == expected) << static_cast<int>(set);
        }
    }
}

// Sums are as near to the real ones as the integers are. Method: against sums in double; each value of T that is not
// zero costs half a unit, a unit being 2^(2 - 8 planes) of the power of two above the token's largest value, and the
// sum is rounded to a float once.
TEST_P(Product, IsNearTheRealSum) {
    const Matrix matrix = random_matrix(50, 700, 0.8, 4);
    const ExtentBuffer extent = coded(matrix, 50);
    const CodedMatrix opened(extent.bytes());
    const TokenPanel x = panel_of(uneven_floats(3 * 700, 5), 3);
    for (const unsigned planes : kPlaneCounts) {
        TokenPanel y(3, 50);
        multiply(opened, TokenPlanes(x, planes), y);
        for (std::size_t token = 0; token < 3; ++token) {
            float largest = 0;
            for (std::size_t i = 0; i < 700; ++i) largest = std::max(largest, std::abs(x.token(token)[i]));
            const double unit = std::ldexp(1.0, std::ilogb(largest) + 1 + 2 - 8 * static_cast<int>(planes));
            for (std::size_t row = 0; row < 50; ++row) {
                double sum = 0;
                double bound = 0;
                for (std::size_t i = 0; i < 700; ++i) {
                    const std::int8_t weight = matrix.values[row * 700 + i];
                    sum += weight * double{x.token(token)[i]};
                    bound += weight ? unit / 2 : 0;
                }
                bound += (std::abs(sum) + bound) * std::ldexp(1.0, -24);
                EXPECT_NEAR(y.token(token)[row], sum, bound) << planes << " planes";
            }
        }
    }
}

// Panels of another shape are refused. Method: each width and count wrong in turn.
TEST_P(Product, RefusesPanelsThatDoNotFit) {
    const Matrix matrix = random_matrix(5, 9, 0.5, 1);
    const ExtentBuffer extent = coded(matrix, 5);
    const CodedMatrix opened(extent.bytes());
    TokenPanel by_column(2, 9);
    TokenPanel by_row(2, 5);
    TokenPanel wide(2, 10);
    TokenPanel more(3, 5);
    const TokenPlanes columns(by_column, kPlanesOfHalf);
    const TokenPlanes rows(by_row, kPlanesOfHalf);
    const TokenPlanes too_wide(wide, kPlanesOfHalf);
    const TokenPlanes too_many(more, kPlanesOfHalf);
    EXPECT_THROW(multiply(opened, too_wide, by_row), InvalidArgument);
    EXPECT_THROW(multiply(opened, columns, wide), InvalidArgument);
    EXPECT_THROW(multiply(opened, columns, more), InvalidArgument);
    EXPECT_THROW(multiply_transposed(opened, too_wide, by_column), InvalidArgument);
    EXPECT_THROW(multiply_transposed(opened, rows, wide), InvalidArgument);
    EXPECT_THROW(multiply_transposed(opened, too_many, by_column), InvalidArgument);
    ColumnSums other_planes(2, kPlanesOfFloat, 9);
    EXPECT_THROW(multiply_tile_transposed(opened, opened.tiles()[0], rows, other_planes), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(All, Product, testing::ValuesIn(kChoices),
                         [](const auto& choice) { return name_of(choice.param); });

/// All kernels that this processor runs: of its sets, and of those that another's best would hide.
std::vector<const ProductKernels*> available_kernels() {
    std::vector<const ProductKernels*> kernels = {&kPortableProducts};
    if (is_available(InstructionSet::avx2)) kernels.push_back(&kAvx2Products);
    if (is_available(InstructionSet::avx512)) kernels.push_back(&kAvx512Products);
    if (is_available(InstructionSet::avx512) && has_vnni()) kernels.push_back(&kVnniProducts);
    return kernels;
}

/// Rows as kernels take them.
struct DecodedRows {
    std::size_t stride;
    std::vector<std::int8_t> values;
    ProductRows rows;

    explicit DecodedRows(const Matrix& matrix)
        : stride((matrix.columns + 63) / 64 * 64),
          values(matrix.rows * stride),
          rows{values.data(), stride, matrix.rows, matrix.columns, 0} {
        for (std::size_t row = 0; row < matrix.rows; ++row) {
            std::copy_n(matrix.values.data() + row * matrix.columns, matrix.columns, values.data() + row * stride);
        }
    }
    DecodedRows(const DecodedRows&) = delete;
};

/// All available sets; planes of one are for kernels of another, too.
std::vector<TokenPlanes> planes_by_sets(const TokenPanel& x, unsigned planes) {
    std::vector<TokenPlanes> all;
    for (const InstructionSet set : available_sets()) all.emplace_back(x, planes, set);
    return all;
}

// Every kernel has the same sums, whether or not products use it here, of whichever set's planes. Method: decoded rows
// given to each; the definition.
TEST(ProductKernels, AllHaveTheSameSums) {
    for (const std::size_t tokens : {5, 8, 19}) {
        const Matrix matrix = random_matrix(75, 200, tokens == 5 ? 0.6 : 0.8, 8);
        const DecodedRows decoded(matrix);
        const TokenPanel x = panel_of(uneven_floats(tokens * matrix.columns, 1), tokens);
        const TokenPanel g = panel_of(uneven_floats(tokens * matrix.rows, 2), tokens);
        for (const unsigned planes : kPlaneCounts) {
            const auto expected_y = forward_formula(matrix, x, planes);
            const auto expected_z = transposed_formula(matrix, g, planes);
            for (const ProductKernels* kernels : available_kernels()) {
                for (const TokenPlanes& of_set : planes_by_sets(x, planes)) {
                    TokenPanel y(tokens, matrix.rows);
                    kernels->multiply(decoded.rows, of_set, y);
                    EXPECT_EQ(bits_of(y), expected_y) << tokens << " tokens";
                }
                const TokenPlanes of_rows(g, planes);
                ColumnSums sums(tokens, planes, matrix.columns);
                sums.expect_rows(matrix.rows);
                kernels->multiply_transposed(decoded.rows, of_rows, sums);
                TokenPanel z(tokens, matrix.columns);
                sums.write(of_rows, z);
                EXPECT_EQ(bits_of(z), expected_z) << tokens << " tokens";
            }
        }
    }
}

// Rows of zeros and of no zeros are as good as others where zeros are passed over, and sums do not overflow. Method: a
// first row with few values, as kernels ask it; then one without zeros, of +1 alone, of -1 and of zeros, longer than a
// list; tokens that are all as large as can be, more than one group of them.
TEST(ProductKernels, PassOverZerosInAnyRow) {
    constexpr std::size_t kColumns = 9001;
    Matrix matrix = random_matrix(5, kColumns, 0.9, 3);
    for (std::size_t i = 0; i < kColumns; ++i) {
        matrix.values[kColumns + i] = i % 3 ? 1 : -1;
        matrix.values[2 * kColumns + i] = 1;
        matrix.values[3 * kColumns + i] = -1;
        matrix.values[4 * kColumns + i] = 0;
    }
    const DecodedRows decoded(matrix);
    for (const std::size_t tokens : {8, 70}) {
        std::vector<float> values = uneven_floats(tokens * kColumns, 1);
        std::fill_n(values.begin(), kColumns, FLT_MAX);
        const TokenPanel x = panel_of(values, tokens);
        for (const unsigned planes : kPlaneCounts) {
            const auto expected = forward_formula(matrix, x, planes);
            for (const ProductKernels* kernels : available_kernels()) {
                for (const TokenPlanes& of_set : planes_by_sets(x, planes)) {
                    TokenPanel y(tokens, matrix.rows);
                    kernels->multiply(decoded.rows, of_set, y);
                    EXPECT_EQ(bits_of(y), expected) << tokens << " tokens";
                }
            }
        }
    }
}

constexpr float kLowDigits = -0x3F808080p0F;  // three digits of -128 below one of -63

// Sums do not overflow in a row as long as there may be. Method: kMaxColumns of +1, and a token whose digits are all as
// low as can be: the sum of one plane alone is beyond 32 bits.
TEST(ProductKernels, OfTheLongestRow) {
    const std::vector<std::int8_t> values(kMaxColumns, 1);
    TokenPanel x(1, kMaxColumns);
    std::fill_n(x.token(0), kMaxColumns, kLowDigits);
    const TokenPlanes planes(x, kPlanesOfFloat);
    const double expected = double{kLowDigits} * double{kMaxColumns};
    for (const ProductKernels* kernels : available_kernels()) {
        TokenPanel y(1, 1);
        kernels->multiply({values.data(), kMaxColumns, 1, kMaxColumns, 0}, planes, y);
        EXPECT_EQ(y.token(0)[0], expected);
    }
}

// Sums of columns do not overflow over as many rows as there may be. Method: rows of +1, given again and again, more
// than the sums of 32 bits hold; parts whose rows together are too many for them.
TEST(ProductKernels, OfTheLongestColumn) {
    constexpr std::size_t kRows = 1 << 16, kRounds = 300, kColumns = 3, kStride = 64;
    const std::vector<std::int8_t> values(kRows * kStride, 1);
    TokenPanel g(1, kRows);
    std::fill_n(g.token(0), kRows, kLowDigits);
    const TokenPlanes planes(g, kPlanesOfFloat);
    const ProductRows rows{values.data(), kStride, kRows, kColumns, 0};
    const ProductKernels& kernels = product_kernels(best_instruction_set());
    ColumnSums sums(1, planes.planes(), kColumns);
    for (std::size_t round = 0; round < kRounds; ++round) {
        sums.expect_rows(kRows);
        kernels.multiply_transposed(rows, planes, sums);
    }
    ColumnSums half(1, planes.planes(), kColumns);
    half.expect_rows(kRows);
    kernels.multiply_transposed(rows, planes, half);
    for (std::size_t round = 1; round < kRounds; ++round) {
        ColumnSums part = half;
        part.add(part);
        sums.add(part);
    }
    // What T + 1 adds too much is taken away for each token once: write() expects kRows rows and there were more.
    const auto over = static_cast<double>(kRounds + 2 * (kRounds - 1));
    const double expected = (2 * over - 1) * kLowDigits * kRows;
    TokenPanel z(1, kColumns);
    sums.write(planes, z);
    for (std::size_t column = 0; column < kColumns; ++column) {
        EXPECT_EQ(z.token(0)[column], static_cast<float>(expected));
    }
}

// Scales of T's columns go into the tokens. Method: two tokens by hand.
TEST(TokenPanel, FoldsScalesIn) {
    const float from[] = {1, 2, 3, 4, 5, 6};
    const float scale[] = {10, 100, -1};
    TokenPanel panel(2, 3);
    panel.fill(from, scale);
    EXPECT_EQ(panel.token(0)[1], 200);
    EXPECT_EQ(panel.token(1)[2], -6);
    EXPECT_EQ(panel.token(1)[3], 0);
}

}  // namespace
}  // namespace torch_offload
