// The loops of y = T x, over vectors of one instruction set (product_loops.h): internal linkage, no standard headers.
// Layer codec: includes base only.
#pragma once

#include "codec/product_loops.h"
#include "codec/product_sparse.h"

namespace torch_offload {
namespace {

constexpr std::size_t kRowsOfChunk = 8;  // rows that a part of the planes is used for while it is in the first cache
constexpr std::size_t kTokensOfChunk = 16;
/// Sums of 32 bits hold so many columns: a column adds no more than 2 times 128.
constexpr std::size_t kMaxColumnsAtOnce = std::size_t{1} << 22;

/// Rows and planes that meet. `sums`: [planes, kRowsOfChunk].
struct Meeting {
    const std::int8_t* rows[kRowsTogether];
    const std::int8_t* planes;
    std::size_t plane_stride;
    std::size_t columns;  // a multiple of 64
    std::int32_t* sums;
};

template <typename Lanes, std::size_t kPlanes>
inline void multiply_block(const Meeting& meeting) noexcept {
    typename Lanes::Sums sums[kPlanes][kRowsTogether];
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRowsTogether; ++r) sums[p][r] = Lanes::zero();
    }
    for (std::size_t column = 0; column < meeting.columns; column += Lanes::kBytes) {
        typename Lanes::Bytes weights[kRowsTogether];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRowsTogether; ++r) weights[r] = Lanes::weights(meeting.rows[r] + column);
#pragma GCC unroll 8
        for (std::size_t p = 0; p < kPlanes; ++p) {
            const auto bytes = Lanes::bytes(meeting.planes + p * meeting.plane_stride + column);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRowsTogether; ++r) {
                sums[p][r] = Lanes::plus_products(sums[p][r], weights[r], bytes);
            }
        }
    }
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPlanes; ++p) Lanes::join(sums[p], meeting.sums + p * kRowsOfChunk);
}

/// As many planes as `count` says, no more than kMost.
template <typename Lanes, std::size_t kMost>
inline void multiply_planes(std::size_t count, const Meeting& meeting) noexcept {
    if constexpr (kMost > 1) {
        if (count < kMost) return multiply_planes<Lanes, kMost - 1>(count, meeting);
    }
    multiply_block<Lanes, kMost>(meeting);
}

/// Some rows, tokens and columns.
struct Chunk {
    std::size_t first_row;
    std::size_t row_count;
    std::size_t first_token;
    std::size_t token_count;
};

/// All planes of some columns. `sums`: [planes, kRowsOfChunk].
template <typename Lanes>
inline void sum_planes(const ProductRows& rows, const TokenPlanes& x, const Chunk& chunk, std::size_t column,
                       std::int32_t* sums) noexcept {
    const std::size_t end = rows.columns - column < kMaxColumnsAtOnce ? rows.columns : column + kMaxColumnsAtOnce;
    Meeting meeting{{}, x.plane(chunk.first_token) + column, x.stride(), (end - column + 63) / 64 * 64, nullptr};
    const std::size_t planes = chunk.token_count * x.planes();
    for (std::size_t plane = 0; plane < planes;) {
        const std::size_t at_once = planes_at_once<Lanes>(planes - plane);
        for (std::size_t row = 0; row < chunk.row_count; row += kRowsTogether) {
            for (std::size_t r = 0; r < kRowsTogether; ++r) {
                const std::size_t there = row + r < chunk.row_count ? row + r : row;  // or one that is not asked for
                meeting.rows[r] = rows.values + (chunk.first_row + there) * rows.stride + column;
            }
            meeting.sums = sums + plane * kRowsOfChunk + row;
            multiply_planes<Lanes, Lanes::kPlanes>(at_once, meeting);
        }
        plane += at_once;
        meeting.planes += at_once * x.stride();
    }
}

template <typename Lanes>
inline void multiply_chunk(const ProductRows& rows, const TokenPlanes& x, const Chunk& chunk, TokenPanel& y) noexcept {
    std::int64_t totals[kTokensOfChunk][kRowsOfChunk];
    std::int32_t sums[kTokensOfChunk * kMaxPlanes][kRowsOfChunk] = {};
    for (std::size_t t = 0; t < chunk.token_count; ++t) {
        for (std::int64_t& total : totals[t]) total = -x.token(chunk.first_token + t).total;
    }
    for (std::size_t column = 0; column < rows.columns; column += kMaxColumnsAtOnce) {
        sum_planes<Lanes>(rows, x, chunk, column, sums[0]);
        for (std::size_t t = 0; t < chunk.token_count; ++t) {
            for (unsigned plane = 0; plane < x.planes(); ++plane) {
                const std::int32_t* const of_plane = sums[t * x.planes() + plane];
                for (std::size_t r = 0; r < kRowsOfChunk; ++r) {
                    totals[t][r] += static_cast<std::int64_t>(of_plane[r]) * (std::int64_t{1} << 8 * plane);
                }
            }
        }
    }
    for (std::size_t t = 0; t < chunk.token_count; ++t) {
        const FixedPoint& point = x.token(chunk.first_token + t).point;
        float* const to = y.token(chunk.first_token + t) + rows.first_row + chunk.first_row;
        float values[kRowsOfChunk];
        for (std::size_t r = 0; r < kRowsOfChunk; ++r) values[r] = point.of_sum(totals[t][r]);
        for (std::size_t r = 0; r < chunk.row_count; ++r) to[r] = values[r];
    }
}

template <typename Lanes>
inline void multiply_dense_rows(const ProductRows& rows, const TokenPlanes& x, TokenPanel& y) noexcept {
    for (std::size_t row = 0; row < rows.count; row += kRowsOfChunk) {
        const std::size_t row_count = rows.count - row < kRowsOfChunk ? rows.count - row : kRowsOfChunk;
        for (std::size_t token = 0; token < x.tokens(); token += kTokensOfChunk) {
            const std::size_t left = x.tokens() - token;
            multiply_chunk<Lanes>(rows, x, {row, row_count, token, left < kTokensOfChunk ? left : kTokensOfChunk}, y);
        }
    }
}

template <typename Lanes>
inline void multiply_rows(const ProductRows& rows, const TokenPlanes& x, TokenPanel& y) noexcept {
    if constexpr (Lanes::kMinTokens != kNeverByColumn) {
        if (!x.columns().is_empty() && is_sparse(rows)) return multiply_sparse_rows<Lanes>(rows, x, y);
    }
    multiply_dense_rows<Lanes>(rows, x, y);
}

}  // namespace
}  // namespace torch_offload
