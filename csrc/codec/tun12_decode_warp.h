// Rows of T from codewords as a warp writes them, two bits for each value. Layer codec: includes base only.
#pragma once

#include "codec/tun12_warp.h"

namespace torch_offload {

/// Both halves' words of QuadRows from their window's group on, in shared memory. All zero at the beginning.
struct QuadWindow {
    std::uint32_t words[kRowsOfWarp][kWindowGroups];
};

template <typename Bits, typename Warp>
OFFLOAD_DEVICE void set_quad_bits(const Warp& warp, const PerLane<Warp, TakenWord<Bits>>& taken,
                                  const PerLane<Warp, Tun12Cursor>& cursors, std::uint32_t columns,
                                  QuadWindow& window) {
    warp.each([&](unsigned lane) {
        for_nonzeros(taken[lane], columns, [&](std::uint32_t column, bool is_minus) {
            const std::uint32_t group = (column - cursors[lane].window) / kValuesOfWord;
            const std::uint32_t two = is_minus ? 3 : 1;
            Warp::set_bits(window.words[lane / kHalfLanes][group], two << column % kValuesOfWord * 2);
        });
    });
}

/// Writes what is whole of both windows, all if a row is at its end, and moves what is not to their fronts. A cursor
/// whose row has been written has no bytes any more.
template <typename Warp>
OFFLOAD_DEVICE void write_window(const Warp& warp, const KernelMatrix& matrix, std::uint32_t first_row,
                                 PerLane<Warp, Tun12Cursor>& cursors, QuadWindow& window, const QuadRows& to) {
    PerLane<Warp, std::uint32_t> carried;
    warp.each([&](unsigned lane) {
        const Tun12Cursor& cursor = cursors[lane];
        if (cursor.bytes == nullptr) return;
        const std::uint32_t (&words)[kWindowGroups] = window.words[lane / kHalfLanes];
        std::uint32_t* const row = to.words + (first_row + lane / kHalfLanes) * to.stride;
        const std::size_t begin = cursor.window / kValuesOfWord;
        const std::size_t end = cursor.column < matrix.columns ? cursor.column / kValuesOfWord : to.stride;
        for (std::size_t group = begin + lane % kHalfLanes; group < end; group += kHalfLanes) {
            row[group] = group - begin < kWindowGroups ? words[group - begin] : 0;
        }
        carried[lane] = end - begin < kWindowGroups ? words[end - begin] : 0;
    });
    warp.each([&](unsigned lane) {
        for (std::uint32_t i = lane % kHalfLanes; i < kWindowGroups; i += kHalfLanes) {
            window.words[lane / kHalfLanes][i] = i == 0 ? carried[lane] : 0;
        }
        if (cursors[lane].column >= matrix.columns) cursors[lane].bytes = nullptr;
    });
}

/// Writes what the words of one class give to both rows. Pre: every lane comes by once for each class, in order.
template <typename Warp>
OFFLOAD_DEVICE void write_class(const Warp& warp, const KernelMatrix& matrix, const KernelClass& one,
                                const std::byte* table, std::uint32_t first_row, PerLane<Warp, Tun12Cursor>& cursors,
                                QuadWindow& window, const QuadRows& to) {
    with_words(one, table, [&](const auto* words) {
        using Bits = decltype(words->plus);
        PerLane<Warp, TakenWord<Bits>> taken;
        while (any_before(warp, cursors, one.end_column)) {
            take_words(warp, words, one.end_column, cursors, taken);
            set_quad_bits<Bits>(warp, taken, cursors, matrix.columns, window);
            write_window(warp, matrix, first_row, cursors, window, to);
        }
    });
}

/// Behind the last class. Rows whose codewords end too early, which are none unless the extent's bytes have changed
/// since they were checked, are filled up with zeros.
template <typename Warp>
OFFLOAD_DEVICE void fill_rows(const Warp& warp, const KernelMatrix& matrix, std::uint32_t first_row,
                              PerLane<Warp, Tun12Cursor>& cursors, QuadWindow& window, const QuadRows& to) {
    warp.each([&](unsigned lane) {
        cursors[lane].window = cursors[lane].column / kHalfLanes * kHalfLanes;
        cursors[lane].column = matrix.columns;
    });
    write_window(warp, matrix, first_row, cursors, window, to);
}

}  // namespace torch_offload
