// Products of T and the planes of tokens on integer tensor cores, as a warp computes them: rows of T come as words of
// QuadRows and become bytes, sums are of 32 bits and exact. Layer codec: includes base only.
//
// mma.m16n8k32 of PTX takes values in any order of K that both operands have. Lane 4 g + t has of 64 of them the 16
// from 16 t on: half of them in each of two products.
#pragma once

#include "codec/kernel_matrix.h"
#include "codec/plane_blocks.h"
#include "codec/warp.h"

namespace torch_offload {

inline constexpr std::uint32_t kMmaRows = 16;
inline constexpr std::uint32_t kBlockWords = kBlockValues / kValuesOfWord;
inline constexpr std::uint32_t kWarpRowTiles = 2;  // of 16 rows that a warp has side by side
inline constexpr std::uint32_t kWarpRows = kWarpRowTiles * kMmaRows;
/// Of the transposed product: a word of 16 columns for each eight lanes.
inline constexpr std::uint32_t kWarpColumnTiles = 8;
inline constexpr std::uint32_t kWarpColumns = kWarpColumnTiles * kMmaRows;

/// The operand of one lane that has rows of T: row g, row g + 8, and both again for the second half of K.
struct RowsOperand {
    std::uint32_t of[4] = {};
};

/// Sums of one lane: rows g, g, g + 8, g + 8 of each tile by tokens 2 t and 2 t + 1 of each plane of eight tokens.
template <std::uint32_t kTiles, std::uint32_t kPlaneTiles>
struct IntegerSums {
    std::int32_t of[kTiles][kPlaneTiles][4] = {};
};

/// Four values of two bits, each at the bottom of four, as bytes 0, 1 and -1. What is above is ignored.
OFFLOAD_HOST_DEVICE inline std::uint32_t ternary_bytes(std::uint32_t four_nibbles) noexcept {
    constexpr std::uint32_t kBytes = 0xFF000100;  // of the codes 0 to 3; none is 2
#ifdef __CUDA_ARCH__
    return __byte_perm(kBytes, 0, four_nibbles);
#else
    std::uint32_t bytes = 0;
    for (unsigned i = 0; i < 4; ++i) bytes |= (kBytes >> (four_nibbles >> 4 * i & 3) * 8 & 255) << 8 * i;
    return bytes;
#endif
}

/// The 16 values of a word in the order of plane_blocks.h: even ones, then odd ones.
OFFLOAD_HOST_DEVICE inline LaneBytes bytes_of_word(std::uint32_t word) noexcept {
    const std::uint32_t even = word & 0x33333333;
    const std::uint32_t odd = word >> 2 & 0x33333333;
    return {{ternary_bytes(even), ternary_bytes(even >> 16), ternary_bytes(odd), ternary_bytes(odd >> 16)}};
}

OFFLOAD_HOST_DEVICE inline LaneBytes load_lane_bytes(const std::byte* block, unsigned lane) noexcept {
#ifdef __CUDA_ARCH__
    const uint4 four = *(reinterpret_cast<const uint4*>(block) + lane);
    return {{four.x, four.y, four.z, four.w}};
#else
    LaneBytes bytes;
    __builtin_memcpy(&bytes, block + lane * sizeof(LaneBytes), sizeof(bytes));
    return bytes;
#endif
}

/// The bytes of kPlaneTiles planes of one block: `stride` bytes from each to the next.
template <std::uint32_t kPlaneTiles>
struct PlaneTiles {
    LaneBytes of[kPlaneTiles];

    OFFLOAD_DEVICE static PlaneTiles load(const std::byte* block, std::size_t stride, unsigned lane) noexcept {
        return load(block, stride, lane, kPlaneTiles, kGroupTokens);
    }
    /// Of groups of `planes` planes each, of which only the first `tokens` tokens are not zero.
    OFFLOAD_DEVICE static PlaneTiles load(const std::byte* block, std::size_t stride, unsigned lane,
                                          std::uint32_t planes, std::uint32_t tokens) noexcept {
        PlaneTiles tiles;
        OFFLOAD_UNROLL
        for (std::uint32_t i = 0; i < kPlaneTiles; ++i) {
            const bool is_there = i / planes * kGroupTokens + lane / 4 < tokens;
            tiles.of[i] = is_there ? load_lane_bytes(block + i * stride, lane) : LaneBytes{};
        }
        return tiles;
    }
};

/// What a lane has of 64 columns of 32 rows: a word of row g and of row g + 8 of each tile.
struct RowWords {
    std::uint32_t of[kWarpRowTiles][2];

    /// `word_at(row, word)`: that of one of 32 rows and of four words.
    template <typename WordAt>
    OFFLOAD_DEVICE static RowWords load(WordAt word_at, unsigned lane) noexcept {
        RowWords words;
        OFFLOAD_UNROLL
        for (std::uint32_t i = 0; i < 2 * kWarpRowTiles; ++i)
            words.of[i / 2][i % 2] = word_at(i * 8 + lane / 4, lane % 4);
        return words;
    }
};

/// What a lane takes into the products of a block of 64 values.
template <std::uint32_t kPlaneTiles>
struct BlockOperands {
    RowWords words;
    PlaneTiles<kPlaneTiles> planes;
};

/// Adds 64 columns of 32 rows.
template <std::uint32_t kPlaneTiles, typename Warp>
OFFLOAD_DEVICE void add_rows(const Warp& warp, const PerLane<Warp, BlockOperands<kPlaneTiles>>& block,
                             PerLane<Warp, IntegerSums<kWarpRowTiles, kPlaneTiles>>& sums) {
    PerLane<Warp, PlaneTiles<kPlaneTiles>> planes;
    warp.alone([&](unsigned lane) { planes[lane] = block[lane].planes; });
    OFFLOAD_UNROLL
    for (std::uint32_t tile = 0; tile < kWarpRowTiles; ++tile) {
        PerLane<Warp, LaneBytes> upper, lower;
        warp.alone([&](unsigned lane) {
            upper[lane] = bytes_of_word(block[lane].words.of[tile][0]);
            lower[lane] = bytes_of_word(block[lane].words.of[tile][1]);
        });
        OFFLOAD_UNROLL
        for (unsigned half = 0; half < 2; ++half) {
            PerLane<Warp, RowsOperand> rows;
            warp.alone([&](unsigned lane) {
                const LaneBytes &up = upper[lane], &low = lower[lane];
                rows[lane] = {{up.of[2 * half], low.of[2 * half], up.of[2 * half + 1], low.of[2 * half + 1]}};
            });
            OFFLOAD_UNROLL
            for (std::uint32_t i = 0; i < kPlaneTiles; ++i) warp.multiply_add(rows, planes, half, sums, tile, i);
        }
    }
}

/// Where the rows of four bytes lie among 16, as the values of a word do in plane_blocks.h.
OFFLOAD_HOST_DEVICE constexpr std::uint32_t row_of_byte(unsigned word, unsigned byte) noexcept {
    return word % 2 * 8 + byte * 2 + word / 2;
}

/// Byte i of what comes out is byte `index` of word i.
struct FourBytes {
    std::uint32_t of[4];
};
OFFLOAD_HOST_DEVICE inline FourBytes transposed(const FourBytes& from) noexcept {
#ifdef __CUDA_ARCH__
    const std::uint32_t low = __byte_perm(from.of[0], from.of[1], 0x5140);
    const std::uint32_t high = __byte_perm(from.of[0], from.of[1], 0x7362);
    const std::uint32_t low_next = __byte_perm(from.of[2], from.of[3], 0x5140);
    const std::uint32_t high_next = __byte_perm(from.of[2], from.of[3], 0x7362);
    return {{__byte_perm(low, low_next, 0x5410), __byte_perm(low, low_next, 0x7632),
             __byte_perm(high, high_next, 0x5410), __byte_perm(high, high_next, 0x7632)}};
#else
    FourBytes to{};
    for (unsigned i = 0; i < 4; ++i) {
        for (unsigned j = 0; j < 4; ++j) to.of[i] |= (from.of[j] >> 8 * i & 255) << 8 * j;
    }
    return to;
#endif
}

/// Adds 64 rows of 128 columns, eight words of each row. `word_at(row, word)`: that of one of 64 rows and of the words.
template <std::uint32_t kPlaneTiles, typename Warp, typename WordAt>
OFFLOAD_DEVICE void add_columns(const Warp& warp, WordAt word_at, const PerLane<Warp, PlaneTiles<kPlaneTiles>>& planes,
                                PerLane<Warp, IntegerSums<kWarpColumnTiles, kPlaneTiles>>& sums) {
    OFFLOAD_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
        PerLane<Warp, FourBytes> words[2];  // of four rows each
        OFFLOAD_UNROLL
        for (unsigned i = 0; i < 2; ++i) {
            warp.alone([&](unsigned lane) {
                OFFLOAD_UNROLL
                for (unsigned byte = 0; byte < 4; ++byte) {
                    const std::uint32_t row = lane % 4 * kLaneValues + row_of_byte(2 * half + i, byte);
                    words[i][lane].of[byte] = word_at(row, lane / 4);
                }
            });
        }
        OFFLOAD_UNROLL
        for (unsigned odd = 0; odd < 2; ++odd) {
            PerLane<Warp, FourBytes> bytes[2][2];  // of columns below 8 and from 8 on, by four rows and four
            warp.alone([&](unsigned lane) {
                OFFLOAD_UNROLL
                for (unsigned i = 0; i < 2; ++i) {
                    FourBytes low, high;
                    OFFLOAD_UNROLL
                    for (unsigned byte = 0; byte < 4; ++byte) {
                        const std::uint32_t nibbles = words[i][lane].of[byte] >> 2 * odd & 0x33333333;
                        low.of[byte] = ternary_bytes(nibbles);
                        high.of[byte] = ternary_bytes(nibbles >> 16);
                    }
                    bytes[0][i][lane] = transposed(low);
                    bytes[1][i][lane] = transposed(high);
                }
            });
            OFFLOAD_UNROLL
            for (unsigned j = 0; j < 4; ++j) {
                PerLane<Warp, RowsOperand> columns;
                warp.alone([&](unsigned lane) {
                    columns[lane] = {{bytes[0][0][lane].of[j], bytes[1][0][lane].of[j], bytes[0][1][lane].of[j],
                                      bytes[1][1][lane].of[j]}};
                });
                OFFLOAD_UNROLL
                for (std::uint32_t i = 0; i < kPlaneTiles; ++i) {
                    warp.multiply_add(columns, planes, half, sums, odd * 4 + j, i);
                }
            }
        }
    }
}

/// The sum of all planes.
template <std::uint32_t kPlanes>
OFFLOAD_HOST_DEVICE std::int64_t joined(const std::int32_t (&planes)[kPlanes]) noexcept {
    std::int64_t sum = 0;
    OFFLOAD_UNROLL
    for (std::uint32_t i = 0; i < kPlanes; ++i) sum += planes[i] * (std::int64_t{1} << 8 * i);
    return sum;
}

/// Calls `use(row, token, planes)` for each of a lane's sums of add_rows: one of 32 rows, one of the tokens of its
/// groups, the sums of all planes.
template <std::uint32_t kPlanes, std::uint32_t kPlaneTiles, typename Use>
OFFLOAD_HOST_DEVICE inline void for_row_sums(unsigned lane, const IntegerSums<kWarpRowTiles, kPlaneTiles>& sums,
                                             Use use) {
    OFFLOAD_UNROLL
    for (std::uint32_t group = 0; group < kPlaneTiles / kPlanes; ++group) {
        OFFLOAD_UNROLL
        for (std::uint32_t i = 0; i < 4 * kWarpRowTiles; ++i) {
            std::int32_t planes[kPlanes];
            OFFLOAD_UNROLL
            for (std::uint32_t j = 0; j < kPlanes; ++j) planes[j] = sums.of[i / 4][group * kPlanes + j][i % 4];
            use(i / 4 * kMmaRows + i % 4 / 2 * 8 + lane / 4, group * kGroupTokens + lane % 4 * 2 + i % 2, planes);
        }
    }
}

/// The same of add_columns: one of 128 columns, one of eight tokens.
template <std::uint32_t kPlanes, typename Use>
OFFLOAD_HOST_DEVICE inline void for_column_sums(unsigned lane, const IntegerSums<kWarpColumnTiles, kPlanes>& sums,
                                                Use use) {
    OFFLOAD_UNROLL
    for (std::uint32_t i = 0; i < 4 * kWarpColumnTiles; ++i) {
        const std::uint32_t tile = i / 4;
        std::int32_t planes[kPlanes];
        OFFLOAD_UNROLL
        for (std::uint32_t j = 0; j < kPlanes; ++j) planes[j] = sums.of[tile][j][i % 4];
        const std::uint32_t column = lane / 4 * kValuesOfWord + i % 4 / 2 * 8 + tile % 4 * 2 + tile / 4;
        use(column, lane % 4 * 2 + i % 2, planes);
    }
}

}  // namespace torch_offload
