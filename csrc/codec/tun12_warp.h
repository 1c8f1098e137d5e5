// TUN12 as a warp decodes it: each half a row, each lane of a half a codeword. Where a word begins follows from the
// lengths of those before it, so a half adds them up; words that would begin behind the class are left for the next
// one. Layer codec: includes base only.
#pragma once

#include "codec/kernel_matrix.h"
#include "codec/warp.h"

namespace torch_offload {

inline constexpr std::uint32_t kRowsOfWarp = kWarpLanes / kHalfLanes;
/// In place of the length of kRestCodeword: more than a row has. Sixteen of them and a row's columns fit 32 bits.
inline constexpr std::uint32_t kRestOfRow = 1U << 25;
/// A half's words of one step lie in that many groups of 16 columns.
inline constexpr std::uint32_t kWindowGroups = 64;
static_assert((kHalfLanes - 1) + kHalfLanes * 63 <= kWindowGroups * kHalfLanes);

/// Where a half stands in its row; every lane has a copy.
struct Tun12Cursor {
    const std::byte* bytes = nullptr;  // of the tile
    std::uint32_t next = 0;            // codeword of the tile
    std::uint32_t end = 0;             // the row's codewords end before this one
    std::uint32_t column = 0;          // that `next` begins at; from the matrix's columns on the row is done
    std::uint32_t window = 0;          // the first column of the group that the last step began in

    OFFLOAD_HOST_DEVICE bool is_before(std::uint32_t end_column) const noexcept {
        return column < end_column && next < end;
    }
};

/// A word and the column of its first value; without values if the lane took none.
template <typename Bits>
struct TakenWord {
    SignedWord<Bits> word;
    std::uint32_t column = 0;
};

OFFLOAD_HOST_DEVICE inline std::uint32_t codeword_at(const std::byte* bytes, std::uint32_t index) noexcept {
    const std::byte* const from = bytes + index * 3 / 2;
    const std::uint32_t two = static_cast<std::uint32_t>(from[0]) | static_cast<std::uint32_t>(from[1]) << 8;
    return two >> (index % 2 * 4) & 4095;
}

template <typename Bits>
OFFLOAD_HOST_DEVICE inline std::uint32_t length_of(const SignedWord<Bits>& word) noexcept {
    const Bits end = word.plus & word.minus;
    return end == 0 ? kRestOfRow : highest_bit(end);
}

/// The cursor of a row's beginning. Of rows that there are not, and those that other coders have: nothing to be done.
OFFLOAD_HOST_DEVICE inline Tun12Cursor first_cursor(const KernelMatrix& matrix, std::uint32_t row) noexcept {
    Tun12Cursor cursor;
    cursor.column = matrix.columns;
    if (row >= matrix.rows) return cursor;
    const KernelTile& tile = matrix.tiles[row / matrix.rows_per_tile];
    if (tile.coder != Coder::tun12) return cursor;
    const bool is_last = row + 1 == tile.first_row + tile.row_count;
    cursor.bytes = matrix.extent + tile.offset_bytes;
    cursor.next = matrix.first_words[row];
    cursor.end = is_last ? tile.size_bytes * 2 / 3 : matrix.first_words[row + 1];
    cursor.column = 0;
    return cursor;
}

/// Each half takes up to 16 words of its row that begin before `end_column`.
template <typename Bits, typename Warp>
OFFLOAD_DEVICE void take_words(const Warp& warp, const SignedWord<Bits>* words, std::uint32_t end_column,
                               PerLane<Warp, Tun12Cursor>& cursors, PerLane<Warp, TakenWord<Bits>>& taken) {
    PerLane<Warp, std::uint32_t> lengths;
    warp.each([&](unsigned lane) {
        const Tun12Cursor& cursor = cursors[lane];
        const std::uint32_t index = cursor.next + lane % kHalfLanes;
        const bool is_there = cursor.column < end_column && index < cursor.end;
        taken[lane].word = is_there ? words[codeword_at(cursor.bytes, index)] : SignedWord<Bits>{};
        lengths[lane] = is_there ? length_of(taken[lane].word) : 0;
    });
    const auto ends = prefix_sums(warp, lengths);
    const std::uint32_t takers = warp.ballot([&](unsigned lane) {
        return lengths[lane] > 0 && cursors[lane].column + ends[lane] - lengths[lane] < end_column;
    });
    const auto count_of = [&](unsigned lane) { return bit_count(takers >> (lane & kHalfLanes) & 0xFFFF); };
    const auto last = warp.of_half(ends, [&](unsigned lane) { return (count_of(lane) - 1) % kHalfLanes; });
    warp.each([&](unsigned lane) {
        Tun12Cursor& cursor = cursors[lane];
        taken[lane].column = cursor.column + ends[lane] - lengths[lane];
        if ((takers >> lane & 1) == 0) taken[lane].word = {};
        cursor.window = cursor.column / kHalfLanes * kHalfLanes;
        cursor.column += count_of(lane) > 0 ? last[lane] : 0;
        cursor.next += count_of(lane);
    });
}

/// Calls `use(column, is_minus)` for each value of a taken word that is not zero and lies in the row.
template <typename Bits, typename Use>
OFFLOAD_DEVICE void for_nonzeros(const TakenWord<Bits>& taken, std::uint32_t columns, Use use) {
    for (Bits left = taken.word.plus ^ taken.word.minus; left != 0; left &= left - 1) {
        const unsigned position = lowest_bit(left);
        if (taken.column + position < columns) use(taken.column + position, (taken.word.minus >> position & 1) != 0);
    }
}

/// Calls `use` with the words of a class as they lie in `table`.
template <typename Use>
OFFLOAD_DEVICE void with_words(const KernelClass& one, const std::byte* table, Use use) {
    if (one.word_bytes == sizeof(SignedWord<std::uint32_t>)) {
        use(reinterpret_cast<const SignedWord<std::uint32_t>*>(table));
    } else {
        use(reinterpret_cast<const SignedWord<std::uint64_t>*>(table));
    }
}

/// Whether a half still has words that begin before `end_column`.
template <typename Warp>
OFFLOAD_DEVICE bool any_before(const Warp& warp, const PerLane<Warp, Tun12Cursor>& cursors, std::uint32_t end_column) {
    return warp.ballot([&](unsigned lane) { return cursors[lane].is_before(end_column); }) != 0;
}

}  // namespace torch_offload
