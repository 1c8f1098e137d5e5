// Products of coded matrices and activations: rows are decoded into the cache and used at once, so T is never in
// memory. Layer codec: includes base only.
//
// Sums are exact: tokens become integers, each by a power of two of its own, and only a sum of integers becomes a float
// again (fixed_point.h). So a result has the same bits for every instruction set, coder and order of the columns, for
// any count of tokens and of threads. A token with an infinity or a not-a-number has sums that are all not-a-number.
#pragma once

#include "base/instruction_set.h"
#include "codec/coded_matrix.h"
#include "codec/column_sums.h"
#include "codec/token_panel.h"
#include "codec/token_planes.h"

namespace torch_offload {

/// y = T x for the rows of one tile. Panels by column are in the order of CodedMatrix::column_order, here and below.
/// `x`: tokens of columns() values. `y`: tokens of rows() floats; only the tile's rows are written.
/// Throws: InvalidArgument if widths or counts do not fit; CorruptPage where the tile cannot be decoded.
/// Threads: any; different tiles of one product at once.
void multiply_tile(const CodedMatrix& matrix, const CodedTile& tile, const TokenPlanes& x, TokenPanel& y,
                   InstructionSet set = best_instruction_set());
/// y = T x, tile by tile.
void multiply(const CodedMatrix& matrix, const TokenPlanes& x, TokenPanel& y,
              InstructionSet set = best_instruction_set());

/// Adds what one tile adds to z = T^T g.
/// `g`: tokens of rows() values, of which the tile's are read. `z`: of columns() columns.
/// Throws, Threads: as multiply_tile; each thread with sums of its own, to be added in any order.
void multiply_tile_transposed(const CodedMatrix& matrix, const CodedTile& tile, const TokenPlanes& g, ColumnSums& z,
                              InstructionSet set = best_instruction_set());
/// z = T^T g, tile by tile. `z`: tokens of columns() floats.
void multiply_transposed(const CodedMatrix& matrix, const TokenPlanes& g, TokenPanel& z,
                         InstructionSet set = best_instruction_set());

}  // namespace torch_offload
