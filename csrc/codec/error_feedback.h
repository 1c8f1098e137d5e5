// Rounding of a matrix to multiples of steps, column after column, each error moved to columns that are still to come.
// Layer codec: includes base only.
//
// Matrices are stored by columns: [columns, rows], a column's values side by side. Rows are independent of each other
// and are worked on kRoundedRows at a time in the cache; what is moved to a column is subtracted in order of the
// columns that it comes from, one product after the other, so results depend neither on the instruction set nor on how
// rows are shared out.
//
// Source: Frantar et al., "GPTQ", ICLR 2023.
#pragma once

#include <cstddef>

#include "base/instruction_set.h"

namespace torch_offload {

inline constexpr std::size_t kRoundedRows = 64;

/// What is rounded, and how. Views: they must outlive the call.
struct RoundedMatrix {
    const float* exact = nullptr;  // [columns, rows]
    std::size_t columns = 0;
    std::size_t rows = 0;
    const float* steps = nullptr;       // [columns], positive: what +1 stands for
    const float* thresholds = nullptr;  // [columns], at least 0: what is larger becomes +1 or -1
    float* values = nullptr;            // [columns, rows], -1, 0 and +1
};

/// Rounds the rows from `first`, kRoundedRows of them or those that are left, and writes their values.
/// `factor`: [columns, columns], upper Cholesky factor of the inverse of the inputs' second moment.
/// Throws: std::bad_alloc. Threads: any; different rows of one matrix at once.
void round_rows(const RoundedMatrix& matrix, const float* factor, std::size_t first,
                InstructionSet set = best_instruction_set());

/// Gives each value of these rows another choice, given all others.
/// `moment`: [columns, columns], the inputs' second moment, with a positive diagonal.
/// Throws, Threads: as round_rows.
void refine(const RoundedMatrix& matrix, const float* moment, std::size_t first,
            InstructionSet set = best_instruction_set());

/// Columns of up to kRoundedRows rows in the cache, filled up with zeros: [columns, kRoundedRows], aligned to 64 bytes.
struct RoundedTile {
    std::size_t columns = 0;
    const float* steps = nullptr;
    const float* thresholds = nullptr;
    float* rest = nullptr;    // round: what is to be rounded; choose: how much each value is wanted higher
    float* values = nullptr;  // choose: as they are, before and after
    float* errors = nullptr;  // scratch, [columns, kRoundedRows]
};

/// The kernels themselves, one pair per source file. Pre: the set is available.
using RoundingKernel = void(const RoundedTile&, const float* matrix) noexcept;
RoundingKernel round_tile_portable, round_tile_avx2, round_tile_avx512;
RoundingKernel choose_tile_portable, choose_tile_avx2, choose_tile_avx512;  // errors: exact less values times steps

}  // namespace torch_offload
