// The loops of z = T^T g, over vectors of one instruction set (product_loops.h): internal linkage, no standard headers.
// Layer codec: includes base only.
#pragma once

#include "codec/product_loops.h"

namespace torch_offload {
namespace {

constexpr std::size_t kRowsOfQuads = 64;  // rows that sums of columns stay in registers for
constexpr std::size_t kMaxQuads = kRowsOfQuads / kRowsTogether;

/// Weights of Lanes::kBytes columns, four rows' side by side.
template <typename Lanes>
struct Quads {
    typename Lanes::Bytes weights[kMaxQuads][kRowsTogether];
    std::size_t count;

    /// Rows behind the last one weigh nothing.
    Quads(const ProductRows& rows, std::size_t first, std::size_t row_count, std::size_t column) noexcept
        : count((row_count + kRowsTogether - 1) / kRowsTogether) {
        for (std::size_t i = 0; i < count; ++i) {
            typename Lanes::Bytes in_rows[kRowsTogether];
            for (std::size_t r = 0; r < kRowsTogether; ++r) {
                const std::size_t row = i * kRowsTogether + r;
                in_rows[r] = row < row_count ? Lanes::weights(rows.values + (first + row) * rows.stride + column)
                                             : Lanes::no_weights();
            }
            Lanes::interleave(in_rows, weights[i]);
        }
    }
};

/// `bytes`: of a plane's first row. `sums`: [kPlanes, ColumnSums::kColumns], of which Lanes::kBytes columns.
template <typename Lanes, std::size_t kPlanes>
inline void add_block(const Quads<Lanes>& quads, const std::int8_t* bytes, std::size_t plane_stride,
                      std::int32_t* to) noexcept {
    constexpr std::size_t kSums = Lanes::kBytes / 4;
    typename Lanes::Sums sums[kPlanes][kRowsTogether];
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kRowsTogether; ++i) {
            sums[p][i] = Lanes::load(to + p * ColumnSums::kColumns + i * kSums);
        }
    }
    for (std::size_t quad = 0; quad < quads.count; ++quad) {
#pragma GCC unroll 8
        for (std::size_t p = 0; p < kPlanes; ++p) {
            const auto four = Lanes::four_bytes(bytes + p * plane_stride + quad * kRowsTogether);
#pragma GCC unroll 8
            for (std::size_t i = 0; i < kRowsTogether; ++i) {
                sums[p][i] = Lanes::plus_products(sums[p][i], quads.weights[quad][i], four);
            }
        }
    }
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kRowsTogether; ++i) {
            Lanes::store(sums[p][i], to + p * ColumnSums::kColumns + i * kSums);
        }
    }
}

template <typename Lanes, std::size_t kMost>
inline void add_planes(std::size_t count, const Quads<Lanes>& quads, const std::int8_t* bytes, std::size_t plane_stride,
                       std::int32_t* to) noexcept {
    if constexpr (kMost > 1) {
        if (count < kMost) return add_planes<Lanes, kMost - 1>(count, quads, bytes, plane_stride, to);
    }
    add_block<Lanes, kMost>(quads, bytes, plane_stride, to);
}

template <typename Lanes>
inline void multiply_rows_transposed(const ProductRows& rows, const TokenPlanes& g, ColumnSums& z) noexcept {
    const std::size_t planes = g.tokens() * g.planes();
    for (std::size_t row = 0; row < rows.count; row += kRowsOfQuads) {
        const std::size_t row_count = rows.count - row < kRowsOfQuads ? rows.count - row : kRowsOfQuads;
        for (std::size_t column = 0; column < rows.columns; column += Lanes::kBytes) {
            const Quads<Lanes> quads(rows, row, row_count, column);
            const std::int8_t* bytes = g.plane(0) + rows.first_row + row;
            std::int32_t* to = z.block(column / ColumnSums::kColumns) + column % ColumnSums::kColumns;
            for (std::size_t plane = 0; plane < planes;) {
                const std::size_t at_once = planes_at_once<Lanes>(planes - plane);
                add_planes<Lanes, Lanes::kPlanes>(at_once, quads, bytes, g.stride(), to);
                plane += at_once;
                bytes += at_once * g.stride();
                to += at_once * ColumnSums::kColumns;
            }
        }
    }
}

}  // namespace
}  // namespace torch_offload
