// Products of coded matrices and activations: rows are decoded into the cache and used at once, so T is never in
// memory. Layer codec: includes base only.
//
// Order of the sums, the same for every instruction set, coder, count of tokens and of threads. Forward: of a row's
// products that of the column in place p (CodedMatrix::column_order) goes to sum p mod kSumLanes, in order of the
// positions; sums are joined by halves (0 with 8, 1 with 9, ...; then 0 with 4; then 2; then 1). So an extent whose
// columns are sorted rounds sums otherwise than one of the same matrix whose columns are not. Transposed: a column's
// products are added in order of the rows of a tile, tiles' sums in order of the tiles, wherever the column lies. A
// product of T and a float is exact, so fused operations have the same bits. Zeros of T are multiplied like other
// values: where x has an infinity, a sum may be a not-a-number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/instruction_set.h"
#include "codec/coded_matrix.h"
#include "codec/token_panel.h"

namespace torch_offload {

inline constexpr std::size_t kSumLanes = 16;

/// y = T x for the rows of one tile. Panels by column are in the order of CodedMatrix::column_order, here and below.
/// `x`: tokens of columns() floats. `y`: tokens of at least rows() floats; only the tile's rows are written.
/// Throws: InvalidArgument if widths or counts do not fit; CorruptPage where the tile cannot be decoded.
/// Threads: any; different tiles of one product at once.
void multiply_tile(const CodedMatrix& matrix, const CodedTile& tile, const TokenPanel& x, TokenPanel& y,
                   InstructionSet set = best_instruction_set());
/// y = T x, tile by tile.
void multiply(const CodedMatrix& matrix, const TokenPanel& x, TokenPanel& y,
              InstructionSet set = best_instruction_set());

/// What one tile adds to z = T^T g.
/// `g`: tokens of rows() floats, of which the tile's are read. `part`: tokens of columns() floats, overwritten.
/// Throws, Threads: as multiply_tile; each tile with a part of its own, to be added in order of the tiles.
void multiply_tile_transposed(const CodedMatrix& matrix, const CodedTile& tile, const TokenPanel& g, TokenPanel& part,
                              InstructionSet set = best_instruction_set());
/// Adds what a tile adds, each float to its own. Pre: equal tokens and widths.
void add_panel(const TokenPanel& part, TokenPanel& z) noexcept;
/// z = T^T g, tile by tile. `z`: tokens of columns() floats.
void multiply_transposed(const CodedMatrix& matrix, const TokenPanel& g, TokenPanel& z,
                         InstructionSet set = best_instruction_set());

/// Decoded rows of a tile and the panels on both sides.
struct ProductRows {
    const std::int8_t* values = nullptr;  // [count, stride], zero from the last column to the next multiple of 64
    std::size_t stride = 0;
    std::size_t count = 0;
    std::size_t columns = 0;
    std::size_t first_row = 0;
};

/// The kernels themselves, one pair per source file. Pre: the set is available.
using ProductKernel = void(const ProductRows&, const TokenPanel& from, TokenPanel& to) noexcept;
ProductKernel product_portable, product_avx2, product_avx512;                                   // x to y
ProductKernel transposed_product_portable, transposed_product_avx2, transposed_product_avx512;  // g adds to z

}  // namespace torch_offload
