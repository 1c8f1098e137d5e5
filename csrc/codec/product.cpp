#include "codec/product.h"

#include "base/check.h"
#include "codec/product_kernels.h"

namespace torch_offload {
namespace {

/// Rows decoded before they are used: few, so that they stay in the first cache; as many as a kernel takes at once.
constexpr std::size_t kRowsAtOnce = 8;
/// More, so that a column's sums are brought from memory less often.
constexpr std::size_t kRowsAtOnceTransposed = 64;

void check_width(const CodedMatrix& matrix, std::size_t width, std::size_t expected) {
    OFFLOAD_CHECK(width == expected, InvalidArgument, "a product of ", matrix.rows(), " x ", matrix.columns(),
                  " takes tokens of ", expected, " values here, not of ", width);
}

void check_tokens(std::size_t tokens, std::size_t others) {
    OFFLOAD_CHECK(tokens == others, InvalidArgument, "a product has as many tokens on both sides, not ", tokens,
                  " and ", others);
}

}  // namespace

bool has_vnni() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi2");
#else
    return false;
#endif
}

const ProductKernels& product_kernels(InstructionSet set) noexcept {
    static const bool is_vnni = has_vnni();
    if (set == InstructionSet::avx512) return is_vnni ? kVnniProducts : kAvx512Products;
    return set == InstructionSet::avx2 ? kAvx2Products : kPortableProducts;
}

void multiply_tile(const CodedMatrix& matrix, const CodedTile& tile, const TokenPlanes& x, TokenPanel& y,
                   InstructionSet set) {
    check_width(matrix, x.width(), matrix.columns());
    check_width(matrix, y.width(), matrix.rows());
    check_tokens(x.tokens(), y.tokens());
    for_rows_of(matrix, tile, set, kRowsAtOnce, [&](std::size_t first, std::size_t count, const TernaryRows& rows) {
        product_kernels(set).multiply({rows.values, rows.stride, count, matrix.columns(), tile.first_row + first}, x,
                                      y);
    });
}

void multiply(const CodedMatrix& matrix, const TokenPlanes& x, TokenPanel& y, InstructionSet set) {
    for (const CodedTile& tile : matrix.tiles()) multiply_tile(matrix, tile, x, y, set);
}

void multiply_tile_transposed(const CodedMatrix& matrix, const CodedTile& tile, const TokenPlanes& g, ColumnSums& z,
                              InstructionSet set) {
    check_width(matrix, g.width(), matrix.rows());
    check_width(matrix, z.columns(), matrix.columns());
    check_tokens(g.tokens() * g.planes(), z.tokens() * z.planes());
    const auto use = [&](std::size_t first, std::size_t count, const TernaryRows& rows) {
        z.expect_rows(count);
        product_kernels(set).multiply_transposed(
            {rows.values, rows.stride, count, matrix.columns(), tile.first_row + first}, g, z);
    };
    for_rows_of(matrix, tile, set, kRowsAtOnceTransposed, use);
}

void multiply_transposed(const CodedMatrix& matrix, const TokenPlanes& g, TokenPanel& z, InstructionSet set) {
    check_width(matrix, z.width(), matrix.columns());
    check_tokens(g.tokens(), z.tokens());
    ColumnSums sums(g.tokens(), g.planes(), matrix.columns());
    for (const CodedTile& tile : matrix.tiles()) multiply_tile_transposed(matrix, tile, g, sums, set);
    sums.write(g, z);
}

}  // namespace torch_offload
