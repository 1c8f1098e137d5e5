// Products of many tokens on tensor cores: rows of T as bfloat16 operands, tokens as the sum of two bfloat16, sums in
// float32. A token has about 16 significant bits then, and the sums another order than that of product.h: for those who
// set torch's float32 matmul precision to "high" or "medium", whose meaning this is. Layer codec: includes base only.
//
// mma.m16n8k16 takes values in any order of K that both operands have. Here lane 4 g + t has of 64 columns the 16 from
// column 16 t on, which are one word of QuadRows for row g and one for row g + 8: 4 of them in each of four products.
#pragma once

#include "codec/kernel_matrix.h"
#include "codec/warp.h"

namespace torch_offload {

inline constexpr unsigned kMmaRows = 16;
inline constexpr unsigned kMmaTokens = 8;
inline constexpr unsigned kMmaColumns = 64;  // of four products

/// The operands of one lane, two bfloat16 in each register, and its sums.
struct MmaRowsOperand {
    std::uint32_t of[4] = {};
};
struct MmaTokensOperand {
    std::uint32_t of[2];
};
template <unsigned kTiles>
struct MmaSums {
    float of[kTiles][4] = {};  // rows g, g, g + 8, g + 8 by tokens 2 t and 2 t + 1 of each tile of 8 tokens
};

/// Tokens as pairs of bfloat16, `high` the nearest and `low` the nearest to what that leaves.
struct SplitPanel {
    std::uint16_t* high = nullptr;  // [tokens, stride], zero behind the last column and the last token
    std::uint16_t* low = nullptr;   // the same
    std::size_t stride = 0;         // a multiple of kMmaColumns
};

/// Two values of T as two bfloat16. `four_bits`: two bits each, the first lowest.
OFFLOAD_HOST_DEVICE constexpr std::uint32_t mma_pair(std::uint32_t four_bits) noexcept {
    const std::uint32_t ones = ((four_bits & 1) | (four_bits & 4) << 14) * 0x3F80U;
    return ones | (four_bits & 2) << 14 | (four_bits & 8) << 28;
}

/// To the nearest bfloat16, of two that are as near the even one; any not-a-number to one.
OFFLOAD_HOST_DEVICE inline std::uint16_t to_bfloat16(float value) noexcept {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

OFFLOAD_HOST_DEVICE inline float from_bfloat16(std::uint16_t half) noexcept {
    return __builtin_bit_cast(float, std::uint32_t{half} << 16);
}

/// Writes both parts of a value. An infinity and a not-a-number leave nothing.
OFFLOAD_HOST_DEVICE inline void write_split(const SplitPanel& to, std::size_t at, float value) noexcept {
    const std::uint16_t high = to_bfloat16(value);
    const bool is_finite = (high & 0x7F80) != 0x7F80;
    to.high[at] = high;
    to.low[at] = is_finite ? to_bfloat16(value - from_bfloat16(high)) : std::uint16_t{0};
}

/// The operand of product `step` of four from the words of rows g and g + 8.
OFFLOAD_HOST_DEVICE inline MmaRowsOperand rows_operand(std::uint32_t word, std::uint32_t word_below,
                                                       unsigned step) noexcept {
    const std::uint32_t quad = word >> 8 * step & 255;
    const std::uint32_t quad_below = word_below >> 8 * step & 255;
    return {{mma_pair(quad & 15), mma_pair(quad_below & 15), mma_pair(quad >> 4), mma_pair(quad_below >> 4)}};
}

/// The 16 values that a lane has of 64 columns of a token, as four operands. Pre: on a multiple of 16 bytes.
struct MmaTokenWords {
    MmaTokensOperand of[4];
};
OFFLOAD_HOST_DEVICE inline MmaTokenWords token_words(const std::uint16_t* from) noexcept {
    MmaTokenWords words;
#ifdef __CUDA_ARCH__
    const uint4 first = *reinterpret_cast<const uint4*>(from);
    const uint4 second = *reinterpret_cast<const uint4*>(from + 8);
    words = {{{{first.x, first.y}}, {{first.z, first.w}}, {{second.x, second.y}}, {{second.z, second.w}}}};
#else
    __builtin_memcpy(&words, from, sizeof(words));
#endif
    return words;
}

/// Adds columns [64 block, + 64) to the sums of rows [first_row, + 16) by tokens [first_token, + 8 kTiles).
template <unsigned kTiles, typename Warp>
OFFLOAD_DEVICE void add_mma_block(const Warp& warp, const KernelMatrix& matrix, const QuadRows& rows,
                                  std::uint32_t first_row, const SplitPanel& panel, std::uint32_t first_token,
                                  std::uint32_t block, PerLane<Warp, MmaSums<kTiles>>& sums) {
    PerLane<Warp, std::uint32_t> words, words_below;
    warp.each([&](unsigned lane) {
        const std::uint32_t row = first_row + lane / 4;
        const std::size_t word = std::size_t{block} * 4 + lane % 4;
        words[lane] = row < matrix.rows ? rows.words[row * rows.stride + word] : 0;
        words_below[lane] = row + 8 < matrix.rows ? rows.words[(row + 8) * rows.stride + word] : 0;
    });
    for (unsigned tile = 0; tile < kTiles; ++tile) {
        PerLane<Warp, MmaTokenWords> high, low;
        warp.each([&](unsigned lane) {
            const std::size_t token = first_token + tile * kMmaTokens + lane / 4;
            const std::size_t at = token * panel.stride + std::size_t{block} * kMmaColumns + lane % 4 * kValuesOfWord;
            high[lane] = token_words(panel.high + at);
            low[lane] = token_words(panel.low + at);
        });
        for (unsigned step = 0; step < 4; ++step) {
            PerLane<Warp, MmaRowsOperand> left;
            PerLane<Warp, MmaTokensOperand> right, right_low;
            warp.each([&](unsigned lane) {
                left[lane] = rows_operand(words[lane], words_below[lane], step);
                right[lane] = high[lane].of[step];
                right_low[lane] = low[lane].of[step];
            });
            warp.multiply_add(left, right, sums, tile);
            warp.multiply_add(left, right_low, sums, tile);
        }
    }
}

/// Calls `use(row, token, sum)` for each sum of a lane.
template <unsigned kTiles, typename Use>
OFFLOAD_HOST_DEVICE inline void for_mma_sums(unsigned lane, const MmaSums<kTiles>& sums, Use use) {
    for (unsigned tile = 0; tile < kTiles; ++tile) {
        for (unsigned i = 0; i < 4; ++i) {
            use(lane / 4 + i / 2 * 8, tile * kMmaTokens + lane % 4 * 2 + i % 2, sums.of[tile][i]);
        }
    }
}

}  // namespace torch_offload
