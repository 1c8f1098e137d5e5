// Products of rows that have two bits for each value (QuadRows), as lanes of a warp compute them: sums have the order
// of product.h, zeros of T are multiplied like other values, so they have the bits of the processors'. Layer codec:
// includes base only.
//
// Tokens go through a product in groups. A panel holds a group's floats side by side, so that one load brings a column
// of all of them: [groups, width, kTokens].
#pragma once

#include "codec/kernel_matrix.h"
#include "codec/warp.h"

namespace torch_offload {

/// The most tokens of a group.
inline constexpr unsigned kMaxGroupTokens = 8;

/// Tokens that are multiplied by one factor per column before they go into a product, or after they come out of it.
template <typename Float>
struct Scaled {
    Float* values = nullptr;       // [tokens, width]
    const float* scale = nullptr;  // [width]
    /// [width]: which of a token's values is in each position of the product; nullptr if all are in their own.
    const std::uint32_t* order = nullptr;
    std::uint32_t tokens = 0;
    std::uint32_t width = 0;

    OFFLOAD_HOST_DEVICE std::size_t value_at(std::size_t position) const noexcept {
        return order ? order[position] : position;
    }
};
using ScaledTokens = Scaled<const float>;
using ScaledSums = Scaled<float>;

/// The floats of a group that belong to one column, in transfers of up to 16 bytes.
template <unsigned kTokens>
struct alignas(kTokens < 4 ? 4 * kTokens : 16) GroupFloats {
    float of[kTokens];

    /// Pre: `from` is on a multiple of the alignment.
    OFFLOAD_HOST_DEVICE static GroupFloats load(const float* from) noexcept {
#ifdef __CUDA_ARCH__
        return *reinterpret_cast<const GroupFloats*>(from);
#else
        GroupFloats floats;
        __builtin_memcpy(&floats, from, sizeof(floats));
        return floats;
#endif
    }
};

/// The number 0, 1 or -1 that the two bits of value `index` of a word stand for.
OFFLOAD_HOST_DEVICE inline float ternary_of(std::uint32_t word, unsigned index) noexcept {
    return static_cast<float>(static_cast<std::int32_t>(word << (30 - 2 * index)) >> 30);
}

/// Element `index` of a panel of `from`, in groups of kTokens; tokens that there are not are zeros.
template <unsigned kTokens>
OFFLOAD_HOST_DEVICE inline float panel_element(const ScaledTokens& from, std::size_t index) noexcept {
    const std::size_t column = from.value_at(index / kTokens % from.width);
    const std::size_t token = index / kTokens / from.width * kTokens + index % kTokens;
    return token < from.tokens ? from.values[token * from.width + column] * from.scale[column] : 0;
}

/// Writes one sum, scaled, if its token is there.
OFFLOAD_HOST_DEVICE inline void write_sum(const ScaledSums& to, std::size_t token, std::size_t position,
                                          float sum) noexcept {
    const std::size_t at = to.value_at(position);
    if (token < to.tokens) to.values[token * to.width + at] = sum * to.scale[at];
}

template <unsigned kRows, unsigned kTokens>
struct BlockSums {
    float of[kRows][kTokens] = {};
};

/// The sums of one lane of a half: columns `lane`, `lane` + 16, ... of kRows rows.
/// `rows`: pointers to words of QuadRows. `panel`: [columns, kTokens].
template <unsigned kRows, unsigned kTokens>
OFFLOAD_HOST_DEVICE inline void add_columns(const std::uint32_t* const (&rows)[kRows], std::uint32_t columns,
                                            const float* panel, unsigned lane, BlockSums<kRows, kTokens>& sums) {
    const float* from = panel + lane * kTokens;
    for (std::uint32_t column = lane; column < columns; column += kValuesOfWord, from += kValuesOfWord * kTokens) {
        const auto inputs = GroupFloats<kTokens>::load(from);
        for (unsigned r = 0; r < kRows; ++r) {
            const float weight = ternary_of(rows[r][column / kValuesOfWord], lane);
            for (unsigned t = 0; t < kTokens; ++t) sums.of[r][t] = plus_product(sums.of[r][t], weight, inputs.of[t]);
        }
    }
}

/// Both halves of a warp: rows [first_row + half kRows, + kRows) by the tokens of a group. `first_token`: of the group.
template <unsigned kRows, unsigned kTokens, typename Warp>
OFFLOAD_DEVICE void multiply_rows_of_warp(const Warp& warp, const KernelMatrix& matrix, const QuadRows& rows,
                                          std::uint32_t first_row, const float* panel, std::uint32_t first_token,
                                          const ScaledSums& y) {
    PerLane<Warp, BlockSums<kRows, kTokens>> sums;
    warp.each([&](unsigned lane) {
        const std::uint32_t* of[kRows];
        for (unsigned r = 0; r < kRows; ++r) {
            const std::uint32_t row = first_row + lane / kHalfLanes * kRows + r;
            of[r] = rows.words + std::size_t{row < matrix.rows ? row : matrix.rows - 1} * rows.stride;
        }
        add_columns<kRows, kTokens>(of, matrix.columns, panel, lane % kHalfLanes, sums[lane]);
    });
    OFFLOAD_UNROLL
    for (unsigned r = 0; r < kRows; ++r) {
        OFFLOAD_UNROLL
        for (unsigned t = 0; t < kTokens; ++t) {
            PerLane<Warp, float> one;
            warp.each([&](unsigned lane) { one[lane] = sums[lane].of[r][t]; });
            one = joined_sums(warp, one);
            warp.each([&](unsigned lane) {
                const std::uint32_t row = first_row + lane / kHalfLanes * kRows + r;
                if (lane % kHalfLanes == 0 && row < matrix.rows) write_sum(y, first_token + t, row, one[lane]);
            });
        }
    }
}

/// What one tile adds to a column of z = T^T g for the tokens of a group: its products in order of the tile's rows.
/// Tiles' parts are to be added in order of the tiles. `panel`: [rows, kTokens].
template <unsigned kTokens>
OFFLOAD_HOST_DEVICE inline void add_tile_column(const KernelMatrix& matrix, const QuadRows& rows, std::uint32_t tile,
                                                std::uint32_t column, const float* panel, float (&part)[kTokens]) {
    const std::uint32_t first = tile * matrix.rows_per_tile;
    const std::uint32_t left = matrix.rows - first;
    const std::uint32_t count = left < matrix.rows_per_tile ? left : matrix.rows_per_tile;
    const std::uint32_t* word = rows.words + first * rows.stride + column / kValuesOfWord;
    const float* from = panel + std::size_t{first} * kTokens;
    for (std::uint32_t row = 0; row < count; ++row, word += rows.stride, from += kTokens) {
        const auto inputs = GroupFloats<kTokens>::load(from);
        const float weight = ternary_of(*word, column % kValuesOfWord);
        for (unsigned t = 0; t < kTokens; ++t) part[t] = plus_product(part[t], weight, inputs.of[t]);
    }
}

}  // namespace torch_offload
