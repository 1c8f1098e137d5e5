// The loops of error_feedback.h, over vectors of one instruction set: internal linkage, no standard headers. Layer
// codec: includes base only.
//
// `Lanes` says how wide a vector is and how many fit the registers: Vector, kVectors of them side by side for each of
// kColumns columns.
#pragma once

#include "codec/error_feedback.h"

namespace torch_offload {
namespace {

/// Columns between two passes over all that follow: their errors stay in the first cache.
constexpr std::size_t kFeedbackBlock = 32;

/// Columns `column` to column + kColumns of `to`, less `count` products: what `from` has in a column of errors, times
/// what the coefficients of that error, a row of `width`, have for the column that is changed.
template <typename Lanes, std::size_t kColumns>
inline void subtract_from_columns(float* to, std::size_t column, const float* coefficients, std::size_t width,
                                  const float* from, std::size_t count) noexcept {
    using Vector = typename Lanes::Vector;
    constexpr std::size_t kWide = sizeof(Vector) / sizeof(float);
    constexpr std::size_t kTogether = Lanes::kVectors * kWide;
    static_assert(kRoundedRows % kTogether == 0);
    for (std::size_t row = 0; row < kRoundedRows; row += kTogether) {
        Vector sums[kColumns][Lanes::kVectors];
#pragma GCC unroll 8
        for (std::size_t c = 0; c < kColumns; ++c) {
#pragma GCC unroll 8
            for (std::size_t v = 0; v < Lanes::kVectors; ++v) {
                sums[c][v] = *reinterpret_cast<const Vector*>(to + (column + c) * kRoundedRows + row + v * kWide);
            }
        }
        for (std::size_t k = 0; k < count; ++k) {
            Vector errors[Lanes::kVectors];
#pragma GCC unroll 8
            for (std::size_t v = 0; v < Lanes::kVectors; ++v) {
                errors[v] = *reinterpret_cast<const Vector*>(from + k * kRoundedRows + row + v * kWide);
            }
#pragma GCC unroll 8
            for (std::size_t c = 0; c < kColumns; ++c) {
                const float coefficient = coefficients[k * width + column + c];
#pragma GCC unroll 8
                for (std::size_t v = 0; v < Lanes::kVectors; ++v) sums[c][v] -= coefficient * errors[v];
            }
        }
#pragma GCC unroll 8
        for (std::size_t c = 0; c < kColumns; ++c) {
#pragma GCC unroll 8
            for (std::size_t v = 0; v < Lanes::kVectors; ++v) {
                *reinterpret_cast<Vector*>(to + (column + c) * kRoundedRows + row + v * kWide) = sums[c][v];
            }
        }
    }
}

/// Columns `begin` to `end` of `to`, less products with `count` columns of errors.
template <typename Lanes>
inline void subtract_products(float* to, std::size_t begin, std::size_t end, const float* coefficients,
                              std::size_t width, const float* from, std::size_t count) noexcept {
    std::size_t column = begin;
    for (; column + Lanes::kColumns <= end; column += Lanes::kColumns) {
        subtract_from_columns<Lanes, Lanes::kColumns>(to, column, coefficients, width, from, count);
    }
    for (; column < end; ++column) subtract_from_columns<Lanes, 1>(to, column, coefficients, width, from, count);
}

/// -1, 0 or +1 for each of a column. `errors`: what is left of `wanted`.
inline void decide(const float* wanted, float step, float threshold, float* values, float* errors) noexcept {
    for (std::size_t row = 0; row < kRoundedRows; ++row) {
        const float above = wanted[row] > threshold ? 1.0F : 0.0F;
        const float below = wanted[row] < -threshold ? 1.0F : 0.0F;
        values[row] = above - below;
        errors[row] = wanted[row] - values[row] * step;
    }
}

/// Calls `visit` with each column; it writes the column's errors, which `matrix` then carries to all that follow.
template <typename Lanes, typename Visit>
inline void for_columns_with_feedback(const RoundedTile& tile, const float* matrix, Visit visit) noexcept {
    for (std::size_t begin = 0; begin < tile.columns; begin += kFeedbackBlock) {
        const std::size_t end = begin + kFeedbackBlock < tile.columns ? begin + kFeedbackBlock : tile.columns;
        for (std::size_t column = begin; column < end; ++column) {
            visit(column);
            subtract_products<Lanes>(tile.rest, column + 1, end, matrix + column * tile.columns, tile.columns,
                                     tile.errors + column * kRoundedRows, 1);
        }
        subtract_products<Lanes>(tile.rest, end, tile.columns, matrix + begin * tile.columns, tile.columns,
                                 tile.errors + begin * kRoundedRows, end - begin);
    }
}

template <typename Lanes>
inline void round_tile(const RoundedTile& tile, const float* factor) noexcept {
    for_columns_with_feedback<Lanes>(tile, factor, [&](std::size_t column) {
        const std::size_t at = column * kRoundedRows;
        decide(tile.rest + at, tile.steps[column], tile.thresholds[column], tile.values + at, tile.errors + at);
        const float diagonal = factor[column * tile.columns + column];
        for (std::size_t row = 0; row < kRoundedRows; ++row) tile.errors[at + row] /= diagonal;
    });
}

/// The errors become, column by column, by how much a column's values times its step have changed.
template <typename Lanes>
inline void choose_tile(const RoundedTile& tile, const float* moment) noexcept {
    // What is wanted of a value is the slope of the output's energy: moment times error.
    float* const slope = tile.rest;
    for (std::size_t i = 0; i < tile.columns * kRoundedRows; ++i) {
        tile.errors[i] = -tile.errors[i];
        slope[i] = 0;
    }
    for (std::size_t begin = 0; begin < tile.columns; begin += kFeedbackBlock) {
        const std::size_t left = tile.columns - begin;
        subtract_products<Lanes>(slope, 0, tile.columns, moment + begin * tile.columns, tile.columns,
                                 tile.errors + begin * kRoundedRows, left < kFeedbackBlock ? left : kFeedbackBlock);
    }
    for_columns_with_feedback<Lanes>(tile, moment, [&](std::size_t column) {
        const float step = tile.steps[column];
        const float diagonal = moment[column * tile.columns + column];
        float* const values = tile.values + column * kRoundedRows;
        float* const changes = tile.errors + column * kRoundedRows;
        alignas(64) float wanted[kRoundedRows];
        alignas(64) float before[kRoundedRows];
        for (std::size_t row = 0; row < kRoundedRows; ++row) {
            before[row] = values[row];
            wanted[row] = values[row] * step + slope[column * kRoundedRows + row] / diagonal;
        }
        decide(wanted, step, tile.thresholds[column], values, changes);
        for (std::size_t row = 0; row < kRoundedRows; ++row) changes[row] = (values[row] - before[row]) * step;
    });
}

}  // namespace
}  // namespace torch_offload
