// y = T x for few tokens as a warp computes it from codewords, without T in memory: the values of a step that are not
// zero become bits, set apart by the sum that they go to, and each lane adds or subtracts its own. Sums have the order
// of product.h, so they have the bits of the processors' where x is finite; zeros of T are left out, so an infinity or
// a not-a-number of x shows only in rows that use it. Layer codec: includes base only.
#pragma once

#include "codec/product_warp.h"
#include "codec/tun12_warp.h"

namespace torch_offload {

/// The nonzero values of both halves' windows, in shared memory: bit b % 32 of word [half][b / 32][j] is that of column
/// window + 16 b + j. All zero between steps.
struct SumBits {
    std::uint32_t plus[kRowsOfWarp][kWindowGroups / 32][kHalfLanes];
    std::uint32_t minus[kRowsOfWarp][kWindowGroups / 32][kHalfLanes];
};

template <unsigned kTokens>
struct TokenSums {
    float of[kTokens] = {};
};

template <typename Bits, typename Warp>
OFFLOAD_DEVICE void set_sum_bits(const Warp& warp, const PerLane<Warp, TakenWord<Bits>>& taken,
                                 const PerLane<Warp, Tun12Cursor>& cursors, std::uint32_t columns, SumBits& bits) {
    warp.each([&](unsigned lane) {
        for_nonzeros(taken[lane], columns, [&](std::uint32_t column, bool is_minus) {
            const std::uint32_t group = (column - cursors[lane].window) / kHalfLanes;
            auto& side = is_minus ? bits.minus : bits.plus;
            Warp::set_bits(side[lane / kHalfLanes][group / 32][column % kHalfLanes], 1U << group % 32);
        });
    });
}

/// Adds one lane's values to its sums, in order of their columns, and clears its bits.
/// `panel`: [columns, kTokens].
template <unsigned kTokens>
OFFLOAD_DEVICE void add_sum_bits(unsigned lane, std::uint32_t window, const float* panel, SumBits& bits,
                                 TokenSums<kTokens>& sums) {
    for (std::uint32_t word = 0; word < kWindowGroups / 32; ++word) {
        std::uint32_t& plus = bits.plus[lane / kHalfLanes][word][lane % kHalfLanes];
        std::uint32_t& minus = bits.minus[lane / kHalfLanes][word][lane % kHalfLanes];
        for (std::uint32_t left = plus | minus; left != 0; left &= left - 1) {
            const unsigned group = lowest_bit(left);
            const std::size_t column = window + (word * 32 + group) * kHalfLanes + lane % kHalfLanes;
            const float sign = minus >> group & 1 ? -1.0F : 1.0F;
            const auto inputs = GroupFloats<kTokens>::load(panel + column * kTokens);
            for (unsigned t = 0; t < kTokens; ++t) sums.of[t] = plus_product(sums.of[t], sign, inputs.of[t]);
        }
        plus = 0;
        minus = 0;
    }
}

/// Adds what the words of one class give to the sums of both rows. Pre: every lane comes by once for each class, in
/// order. `table`: the class's words, where they are read fastest.
template <unsigned kTokens, typename Warp>
OFFLOAD_DEVICE void add_class(const Warp& warp, const KernelMatrix& matrix, const KernelClass& one,
                              const std::byte* table, const float* panel, PerLane<Warp, Tun12Cursor>& cursors,
                              SumBits& bits, PerLane<Warp, TokenSums<kTokens>>& sums) {
    with_words(one, table, [&](const auto* words) {
        using Bits = decltype(words->plus);
        PerLane<Warp, TakenWord<Bits>> taken;
        while (any_before(warp, cursors, one.end_column)) {
            take_words(warp, words, one.end_column, cursors, taken);
            set_sum_bits<Bits>(warp, taken, cursors, matrix.columns, bits);
            warp.each([&](unsigned lane) { add_sum_bits(lane, cursors[lane].window, panel, bits, sums[lane]); });
        }
    });
}

}  // namespace torch_offload
