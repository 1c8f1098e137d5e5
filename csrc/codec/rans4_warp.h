// A tile of RANS4 as a warp decodes it: each lane has two of the 64 interleaved rows. Who takes the next 16-bit words
// is found by a ballot, so a step of all rows has no order among them but that of the words. Steps depend on one
// another: a tile takes as long as it has quads in a row, times the 64 rows that it has. Layer codec: includes base
// only.
#pragma once

#include "codec/kernel_matrix.h"
#include "codec/warp.h"

namespace torch_offload {

inline constexpr unsigned kRowsOfLane = kRansLanes / kWarpLanes;
/// Words brought at once: many enough for the way to memory to be a small part.
inline constexpr std::uint32_t kRansWindowWords = 1024;

/// The words of a tile from `first` on, in shared memory.
struct RansWindow {
    std::uint16_t words[kRansWindowWords];
};

/// Where a tile's words lie and how far they have been taken; every lane has a copy.
struct RansCursor {
    const std::byte* words = nullptr;
    std::uint32_t count = 0;
    std::uint32_t first = 0;  // of the window
    std::uint32_t next = 0;
};

/// Of each lane: rows `lane` and `lane` + 32 of the 64.
struct RansRowPair {
    std::uint32_t states[kRowsOfLane] = {};
    std::uint32_t quads[kRowsOfLane] = {};  // the word of QuadRows that is being put together
};

OFFLOAD_HOST_DEVICE inline std::uint32_t rans_quotient(std::uint32_t slot, std::uint32_t state) noexcept {
    return (slot >> 8 & 4095) * (state >> kFrequencyBits) + (slot >> 20);
}

/// Writes the slots of a class, as slots_of has them.
template <typename Warp>
OFFLOAD_DEVICE void fill_slots(const Warp& warp, const KernelClass& one, std::uint32_t* slots) {
    warp.each([&](unsigned lane) {
        std::uint32_t* next = slots;
        for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
            const std::uint32_t first = one.symbols[symbol];
            const std::uint32_t count = first >> 8;
            for (std::uint32_t i = lane; i < count; i += kWarpLanes) next[i] = first | i << 20;
            next += count;
        }
    });
}

template <typename Warp>
OFFLOAD_DEVICE void fill_window(const Warp& warp, RansCursor& cursor, RansWindow& window) {
    cursor.first = cursor.next;
    const auto* const words = reinterpret_cast<const std::uint16_t*>(cursor.words);
    warp.each([&](unsigned lane) {
        for (std::uint32_t i = lane; i < kRansWindowWords; i += kWarpLanes) {
            window.words[i] = cursor.first + i < cursor.count ? words[cursor.first + i] : 0;
        }
    });
}

/// One quad of each of the first `row_count` rows. The quad's code goes to bits `shift` and above.
template <typename Warp>
OFFLOAD_DEVICE void step_rows(const Warp& warp, const std::uint32_t* slots, std::uint32_t row_count, unsigned shift,
                              RansCursor& cursor, RansWindow& window, PerLane<Warp, RansRowPair>& pairs) {
    if (cursor.next - cursor.first + kRansLanes > kRansWindowWords) fill_window(warp, cursor, window);
    warp.each([&](unsigned lane) {
        for (unsigned i = 0; i < kRowsOfLane; ++i) {
            if (lane + i * kWarpLanes >= row_count) continue;
            RansRowPair& pair = pairs[lane];
            const std::uint32_t slot = slots[pair.states[i] % kFrequencyTotal];
            pair.states[i] = rans_quotient(slot, pair.states[i]);
            pair.quads[i] |= (slot & 255) << shift;
        }
    });
    for (unsigned i = 0; i < kRowsOfLane; ++i) {
        const std::uint32_t takers = warp.ballot(
            [&](unsigned lane) { return lane + i * kWarpLanes < row_count && pairs[lane].states[i] < kRansFloor; });
        warp.each([&](unsigned lane) {
            if ((takers >> lane & 1) == 0) return;
            const std::uint32_t before = bit_count(takers & ((1U << lane) - 1));
            std::uint32_t& state = pairs[lane].states[i];
            state = state << 16 | window.words[cursor.next - cursor.first + before];
        });
        cursor.next += bit_count(takers);
    }
}

/// Writes the word of QuadRows that is whole. Behind the last column is what the last quad has there: it is cleared,
/// and so are the words up to the stride.
template <typename Warp>
OFFLOAD_DEVICE void write_quads(const Warp& warp, std::uint32_t columns, std::uint32_t quad, std::uint32_t first_row,
                                std::uint32_t row_count, PerLane<Warp, RansRowPair>& pairs, const QuadRows& to) {
    const std::uint32_t quad_count = (columns + kQuad - 1) / kQuad;
    const bool is_last = quad + 1 == quad_count;
    if (quad % kQuad != kQuad - 1 && !is_last) return;
    const std::uint32_t beyond = is_last ? columns % kValuesOfWord : 0;
    const std::uint32_t mask = beyond > 0 ? (1U << 2 * beyond) - 1 : ~0U;
    warp.each([&](unsigned lane) {
        for (unsigned i = 0; i < kRowsOfLane; ++i) {
            if (lane + i * kWarpLanes >= row_count) continue;
            std::uint32_t* const row = to.words + (first_row + lane + i * kWarpLanes) * to.stride;
            row[quad / kQuad] = pairs[lane].quads[i] & mask;
            pairs[lane].quads[i] = 0;
            for (std::size_t word = quad / kQuad + 1; is_last && word < to.stride; ++word) row[word] = 0;
        }
    });
}

/// Writes all rows of a tile. `slots(i)`: the slots of class i, where they are read fastest, until it is asked for
/// those of another; all lanes come by together. If the extent's bytes have changed since they were checked, words that
/// there are not are zeros.
template <typename Warp, typename Slots>
OFFLOAD_DEVICE void write_rans_tile(const Warp& warp, const KernelMatrix& matrix, const KernelTile& tile, Slots slots,
                                    RansWindow& window, const QuadRows& to) {
    const std::uint32_t lanes = tile.row_count < kRansLanes ? tile.row_count : kRansLanes;
    const std::byte* const bytes = matrix.extent + tile.offset_bytes;
    const auto* const states = reinterpret_cast<const std::uint32_t*>(bytes);
    const std::uint32_t state_bytes = lanes * sizeof(std::uint32_t);
    RansCursor cursor{bytes + state_bytes, (tile.size_bytes - state_bytes) / 2, 0, 0};
    PerLane<Warp, RansRowPair> pairs;
    warp.each([&](unsigned lane) {
        for (unsigned i = 0; i < kRowsOfLane; ++i) {
            if (lane + i * kWarpLanes < lanes) pairs[lane].states[i] = states[lane + i * kWarpLanes];
        }
    });
    fill_window(warp, cursor, window);
    for (std::uint32_t row = 0; row < tile.row_count; row += kRansLanes) {
        const std::uint32_t left = tile.row_count - row;
        const std::uint32_t row_count = left < kRansLanes ? left : kRansLanes;
        std::uint32_t quad = 0;
        for (std::uint32_t i = 0; i < matrix.class_count; ++i) {
            if (quad == matrix.classes[i].end_quad) continue;
            const std::uint32_t* const own = slots(i);
            for (; quad < matrix.classes[i].end_quad; ++quad) {
                step_rows(warp, own, row_count, quad % kQuad * 8, cursor, window, pairs);
                write_quads(warp, matrix.columns, quad, tile.first_row + row, row_count, pairs, to);
            }
        }
    }
}

}  // namespace torch_offload
