// What products are made of, for each instruction set: tokens to planes, and rows of T times planes. Layer codec:
// includes base only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/instruction_set.h"
#include "codec/column_sums.h"
#include "codec/token_panel.h"
#include "codec/token_planes.h"

namespace torch_offload {

/// Decoded rows of a tile.
struct ProductRows {
    const std::int8_t* values = nullptr;  // [count, stride], zero from the last column to the next multiple of 64
    std::size_t stride = 0;
    std::size_t count = 0;
    std::size_t columns = 0;
    std::size_t first_row = 0;
};

struct ProductKernels {
    /// The bytes of a token's integers. `values`: [width], a multiple of kPanelWidth. `to`: [planes, width], zeros.
    PlanedToken (*write_planes)(const float* values, std::size_t width, unsigned planes, std::int8_t* to) noexcept;
    /// y = T x for these rows.
    void (*multiply)(const ProductRows& rows, const TokenPlanes& x, TokenPanel& y) noexcept;
    /// Adds T^T g of these rows. Pre: z expects them.
    void (*multiply_transposed)(const ProductRows& rows, const TokenPlanes& g, ColumnSums& z) noexcept;
    /// From so many tokens on multiply() wants them by column.
    std::size_t fewest_by_column;
};

inline constexpr std::size_t kNeverByColumn = SIZE_MAX;

extern const ProductKernels kPortableProducts;
// Those below may be used where the processor has the instructions.
extern const ProductKernels kAvx2Products;
extern const ProductKernels kAvx512Products;
extern const ProductKernels kVnniProducts;  // AVX-512 with VNNI and VBMI2

/// True if this processor has what kVnniProducts needs beside AVX-512.
bool has_vnni() noexcept;
/// The fastest of a set. Pre: it is available.
const ProductKernels& product_kernels(InstructionSet set) noexcept;

}  // namespace torch_offload
