#include "codec/product.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/check.h"
#include "codec/encode.h"
#include "codec/outcomes.h"

namespace torch_offload {
namespace {

class Product : public testing::TestWithParam<CoderChoice> {
protected:
    ExtentBuffer coded(const Matrix& matrix, std::size_t rows_per_tile) const {
        EncodeOptions options;
        options.coder = GetParam();
        options.rows_per_tile = rows_per_tile;
        if (matrix.columns > 20) options.classes.push_back({20});
        return encode(matrix.view(), options);
    }
};

struct Shape {
    std::size_t rows, columns, tokens, rows_per_tile;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1},     {1, 77, 3, 1},     {70, 1, 2, 64},    {3, 15, 64, 2},   {9, 16, 5, 9},
                             {67, 130, 4, 64}, {130, 257, 1, 50}, {20, 500, 13, 20}, {65, 64, 8, 128}, {6, 1000, 2, 4}};

// Products have the bits of the documented order, by every coder and instruction set. Method: the order written down
// once more, number by number; shapes around what registers, rows at once and tiles hold.
TEST_P(Product, SumsInTheDocumentedOrder) {
    std::uint32_t seed = 1;
    for (const Shape& shape : kShapes) {
        const Matrix matrix = random_matrix(shape.rows, shape.columns, 0.7, ++seed);
        const ExtentBuffer extent = coded(matrix, shape.rows_per_tile);
        const CodedMatrix opened(extent.bytes());
        const TokenPanel x = panel_of(uneven_floats(shape.tokens * shape.columns, seed), shape.tokens);
        const TokenPanel g = panel_of(uneven_floats(shape.tokens * shape.rows, seed + 100), shape.tokens);
        const auto expected_y = forward_formula(matrix, x);
        const auto expected_z = transposed_formula(matrix, shape.rows_per_tile, g);
        for (const InstructionSet set : available_sets()) {
            TokenPanel y(shape.tokens, shape.rows);
            multiply(opened, x, y, set);
            EXPECT_EQ(bits_of(y), expected_y)
                << shape.rows << " x " << shape.columns << " by " << static_cast<int>(set);
            TokenPanel z(shape.tokens, shape.columns);
            z.token(0)[0] = 5;  // what was there does not matter
            multiply_transposed(opened, g, z, set);
            EXPECT_EQ(bits_of(z), expected_z)
                << shape.rows << " x " << shape.columns << " by " << static_cast<int>(set);
        }
    }
}

// Tiles may be multiplied by several threads, and a token has the same bits among others as alone. Method: a thread per
// tile against one for all; eleven tokens against each alone.
TEST_P(Product, DependsOnNeitherThreadsNorOtherTokens) {
    const Matrix matrix = random_matrix(150, 333, 0.9, 5);
    const ExtentBuffer extent = coded(matrix, 64);
    const CodedMatrix opened(extent.bytes());
    const std::vector<float> inputs = uneven_floats(11 * 333, 6);
    const TokenPanel x = panel_of(inputs, 11);
    TokenPanel y(11, 150);
    multiply(opened, x, y);
    TokenPanel by_threads(11, 150);
    std::vector<std::thread> threads;
    for (const CodedTile& tile : opened.tiles()) {
        threads.emplace_back([&] { multiply_tile(opened, tile, x, by_threads); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(bits_of(by_threads), bits_of(y));
    for (std::size_t i = 0; i < 11; ++i) {
        const TokenPanel one = panel_of({inputs.begin() + static_cast<std::ptrdiff_t>(i * 333),
                                         inputs.begin() + static_cast<std::ptrdiff_t>((i + 1) * 333)},
                                        1);
        TokenPanel alone(1, 150);
        multiply(opened, one, alone);
        for (std::size_t row = 0; row < 150; ++row) EXPECT_EQ(alone.token(0)[row], y.token(i)[row]) << i;
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
    EXPECT_THROW(multiply(opened, wide, by_row), InvalidArgument);
    EXPECT_THROW(multiply(opened, by_column, wide), InvalidArgument);
    EXPECT_THROW(multiply(opened, by_column, more), InvalidArgument);
    EXPECT_THROW(multiply_transposed(opened, wide, by_column), InvalidArgument);
    EXPECT_THROW(multiply_transposed(opened, by_row, wide), InvalidArgument);
    EXPECT_THROW(multiply_transposed(opened, more, by_column), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(All, Product, testing::ValuesIn(kChoices),
                         [](const auto& choice) { return name_of(choice.param); });

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
