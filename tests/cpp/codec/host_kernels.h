// What kernels do with a coded matrix, done by a loop that stands for warps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/kernel_matrix.h"
#include "codec/product_warp.h"
#include "codec/rans4_warp.h"
#include "codec/tun12_decode_warp.h"
#include "codec/tun12_product_warp.h"

namespace torch_offload {

/// Decodes as the kernels do, one warp after the other. 0x77 stands in every word that nobody writes.
inline std::vector<std::uint32_t> quad_words_of(const KernelMatrix& matrix, HostWarp warp = {}) {
    const std::size_t stride = quad_row_words(matrix.columns);
    std::vector<std::uint32_t> words(matrix.rows * stride, 0x77777777);
    const QuadRows to{words.data(), stride};
    for (std::uint32_t row = 0; row < matrix.rows; row += kRowsOfWarp) {
        QuadWindow window{};
        HostWarp::PerLane<Tun12Cursor> positions;
        warp.each([&](unsigned lane) { positions[lane] = first_cursor(matrix, row + lane / kHalfLanes); });
        for (std::uint32_t i = 0; i < matrix.class_count; ++i) {
            write_class(warp, matrix, matrix.classes[i], matrix.classes[i].words, row, positions, window, to);
        }
        fill_rows(warp, matrix, row, positions, window, to);
    }
    for (std::uint32_t i = 0; i < matrix.tile_count; ++i) {
        if (matrix.tiles[i].coder != Coder::rans4) continue;
        RansWindow window;
        const auto slots = [&](std::uint32_t index) { return matrix.classes[index].slots; };
        write_rans_tile(warp, matrix, matrix.tiles[i], slots, window, to);
    }
    return words;
}

/// All groups' panels, one behind the other.
template <unsigned kTokens>
std::vector<float> panels_of(const ScaledTokens& from) {
    const std::size_t groups = (from.tokens + kTokens - 1) / kTokens;
    std::vector<float> panels(groups * from.width * kTokens);
    for (std::size_t i = 0; i < panels.size(); ++i) panels[i] = panel_element<kTokens>(from, i);
    return panels;
}

/// y = T x as the kernel of tun12_cuda.cu: two rows per warp, class by class. Pre: one group of tokens.
template <unsigned kTokens>
void multiply_codewords(const KernelMatrix& matrix, const ScaledTokens& x, const ScaledSums& y, HostWarp warp) {
    const std::vector<float> panel = panels_of<kTokens>(x);
    for (std::uint32_t row = 0; row < matrix.rows; row += kRowsOfWarp) {
        SumBits bits{};
        HostWarp::PerLane<Tun12Cursor> positions;
        HostWarp::PerLane<TokenSums<kTokens>> sums;
        warp.each([&](unsigned lane) { positions[lane] = first_cursor(matrix, row + lane / kHalfLanes); });
        for (std::uint32_t i = 0; i < matrix.class_count; ++i) {
            const KernelClass& its_class = matrix.classes[i];
            add_class<kTokens>(warp, matrix, its_class, its_class.words, panel.data(), positions, bits, sums);
        }
        for (unsigned t = 0; t < kTokens; ++t) {
            HostWarp::PerLane<float> each;
            warp.each([&](unsigned lane) { each[lane] = sums[lane].of[t]; });
            each = joined_sums(warp, each);
            for (std::uint32_t half = 0; half < kRowsOfWarp; ++half) {
                if (row + half < matrix.rows) write_sum(y, t, row + half, each[half * kHalfLanes]);
            }
        }
    }
}

/// y = T x of decoded rows as the kernel of product_cuda.cu, group by group.
template <unsigned kRows, unsigned kTokens>
void multiply_quads(const KernelMatrix& matrix, const QuadRows& rows, const ScaledTokens& x, const ScaledSums& y,
                    HostWarp warp) {
    const std::vector<float> panels = panels_of<kTokens>(x);
    for (std::uint32_t group = 0; group * kTokens < x.tokens; ++group) {
        const float* const panel = panels.data() + std::size_t{group} * x.width * kTokens;
        for (std::uint32_t row = 0; row < matrix.rows; row += 2 * kRows) {
            multiply_rows_of_warp<kRows, kTokens>(warp, matrix, rows, row, panel, group * kTokens, y);
        }
    }
}

/// A column of z = T^T g, as the kernel of product_cuda.cu adds its tiles' parts.
template <unsigned kTokens>
void multiply_column(const KernelMatrix& matrix, const QuadRows& rows, std::uint32_t column, const float* panel,
                     std::uint32_t first_token, const ScaledSums& z) {
    float sums[kTokens] = {};
    for (std::uint32_t tile = 0; tile < matrix.tile_count; ++tile) {
        float part[kTokens] = {};
        add_tile_column(matrix, rows, tile, column, panel, part);
        for (unsigned t = 0; t < kTokens; ++t) sums[t] = sums[t] + part[t];
    }
    for (unsigned t = 0; t < kTokens; ++t) write_sum(z, first_token + t, column, sums[t]);
}

/// z = T^T g, group by group.
template <unsigned kTokens>
void multiply_quads_transposed(const KernelMatrix& matrix, const QuadRows& rows, const ScaledTokens& g,
                               const ScaledSums& z) {
    const std::vector<float> panels = panels_of<kTokens>(g);
    for (std::uint32_t group = 0; group * kTokens < g.tokens; ++group) {
        const float* const panel = panels.data() + std::size_t{group} * g.width * kTokens;
        for (std::uint32_t column = 0; column < matrix.columns; ++column) {
            multiply_column<kTokens>(matrix, rows, column, panel, group * kTokens, z);
        }
    }
}

}  // namespace torch_offload
