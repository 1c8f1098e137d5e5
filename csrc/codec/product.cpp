#include "codec/product.h"

#include <algorithm>

#include "base/check.h"

namespace torch_offload {
namespace {

/// Rows decoded before they are used: few, so that they stay in the first cache; even more than a kernel takes at once.
constexpr std::size_t kRowsAtOnce = 8;

struct Kernels {
    ProductKernel* forward;
    ProductKernel* transposed;
};

Kernels kernels_of(InstructionSet set) noexcept {
    if (set == InstructionSet::avx512) return {product_avx512, transposed_product_avx512};
    if (set == InstructionSet::avx2) return {product_avx2, transposed_product_avx2};
    return {product_portable, transposed_product_portable};
}

void check_panels(const CodedMatrix& matrix, const TokenPanel& by_column, const TokenPanel& by_row) {
    OFFLOAD_CHECK(by_column.width() == matrix.columns() && by_row.width() == matrix.rows() &&
                      by_column.tokens() == by_row.tokens(),
                  InvalidArgument, "a product of ", matrix.rows(), " x ", matrix.columns(), " takes as many tokens of ",
                  matrix.columns(), " and of ", matrix.rows(), " floats, not ", by_column.tokens(), " of ",
                  by_column.width(), " and ", by_row.tokens(), " of ", by_row.width());
}

/// Decodes a tile, some rows at a time, and has a kernel take them.
void multiply_rows(const CodedMatrix& matrix, const CodedTile& tile, InstructionSet set, ProductKernel* kernel,
                   const TokenPanel& from, TokenPanel& to) {
    for_rows_of(matrix, tile, set, kRowsAtOnce, [&](std::size_t first, std::size_t count, const TernaryRows& rows) {
        kernel({rows.values, rows.stride, count, matrix.columns(), tile.first_row + first}, from, to);
    });
}

}  // namespace

void multiply_tile(const CodedMatrix& matrix, const CodedTile& tile, const TokenPanel& x, TokenPanel& y,
                   InstructionSet set) {
    check_panels(matrix, x, y);
    multiply_rows(matrix, tile, set, kernels_of(set).forward, x, y);
}

void multiply(const CodedMatrix& matrix, const TokenPanel& x, TokenPanel& y, InstructionSet set) {
    for (const CodedTile& tile : matrix.tiles()) multiply_tile(matrix, tile, x, y, set);
}

void multiply_tile_transposed(const CodedMatrix& matrix, const CodedTile& tile, const TokenPanel& g, TokenPanel& part,
                              InstructionSet set) {
    check_panels(matrix, part, g);
    for (std::size_t i = 0; i < part.tokens(); ++i) std::fill_n(part.token(i), part.stride(), 0.0F);
    multiply_rows(matrix, tile, set, kernels_of(set).transposed, g, part);
}

void add_panel(const TokenPanel& part, TokenPanel& z) noexcept {
    for (std::size_t i = 0; i < z.tokens(); ++i) {
        for (std::size_t j = 0; j < z.width(); ++j) z.token(i)[j] += part.token(i)[j];
    }
}

void multiply_transposed(const CodedMatrix& matrix, const TokenPanel& g, TokenPanel& z, InstructionSet set) {
    TokenPanel part(z.tokens(), z.width());
    check_panels(matrix, z, g);
    for (std::size_t i = 0; i < z.tokens(); ++i) std::fill_n(z.token(i), z.stride(), 0.0F);
    for (const CodedTile& tile : matrix.tiles()) {
        multiply_tile_transposed(matrix, tile, g, part, set);
        add_panel(part, z);
    }
}

}  // namespace torch_offload
