// What kernels do with a coded matrix, done by a loop that stands for warps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/integer_products.h"
#include "codec/kernel_matrix.h"
#include "codec/plane_blocks.h"
#include "codec/rans4_warp.h"
#include "codec/tun12_slices.h"

namespace torch_offload {

/// Decodes a slice of a row of TUN12 as a lane does. Returns whether there is such a row.
inline bool decode_slice(const KernelMatrix& matrix, std::uint32_t row, std::uint32_t slice,
                         std::array<std::uint32_t, kRoomWords>& room) {
    if (matrix.row_words == nullptr) return false;
    const SliceStart start = SliceStart::of(matrix, row, slice);
    if (!start.is_there) return false;
    std::array<std::uint32_t, std::size_t{kSlotWords} * kWarpLanes> slots;
    const std::uint32_t begin = slice * kSliceColumns;
    const std::uint32_t end = std::min(begin + kSliceColumns, matrix.columns);
    CodewordReader reader(matrix, start, slots.data());
    SliceWriter writer(room.data(), 1, start.skipped);
    std::uint32_t column = begin - start.skipped;
    for (std::uint32_t i = 0; i < matrix.class_count; ++i) {
        column = take_class(matrix, i, matrix.classes[i].words, column, end, reader, writer);
    }
    writer.finish(end - begin);
    return true;
}

/// Decodes as the kernels do, one slice or warp after the other. 0x77 stands in every word that nobody writes.
inline std::vector<std::uint32_t> quad_words_of(const KernelMatrix& matrix, HostWarp warp = {}) {
    const std::size_t stride = quad_row_words(matrix.columns);
    std::vector<std::uint32_t> words(matrix.rows * stride, 0x77777777);
    const QuadRows to{words.data(), stride};
    for (std::uint32_t row = 0; row < matrix.rows; ++row) {
        for (std::uint32_t slice = 0; slice * kSliceColumns < matrix.columns; ++slice) {
            std::array<std::uint32_t, kRoomWords> decoded;
            decoded.fill(0x77777777);
            if (!decode_slice(matrix, row, slice, decoded)) continue;
            const std::size_t first = slice * kSliceWords;
            for (std::size_t i = first; i < std::min<std::size_t>(first + kSliceWords, stride); ++i) {
                words[row * stride + i] = decoded[kGuardWords + i - first];
            }
        }
    }
    for (std::uint32_t i = 0; i < matrix.tile_count; ++i) {
        if (matrix.tiles[i].coder != Coder::rans4) continue;
        RansWindow window;
        std::vector<std::uint32_t> own(kFrequencyTotal);
        const auto slots = [&](std::uint32_t index) {
            fill_slots(warp, matrix.classes[index], own.data());
            return own.data();
        };
        write_rans_tile(warp, matrix, matrix.tiles[i], slots, window, to);
    }
    return words;
}

/// Planes of tokens, in memory of their own.
struct HostPlanes {
    std::vector<std::byte> bytes;
    std::vector<std::uint32_t> most_bits;
    PlaneBlocks planes;

    /// `from`: float32, whatever the type says, which chooses how many planes there are.
    explicit HostPlanes(const ScaledTokens& from) : planes(plane_blocks_for(from.tokens, from.width, from.type)) {
        bytes.resize(planes.size_bytes());
        most_bits.resize(std::size_t{planes.groups} * kGroupTokens);
        planes.bytes = bytes.data();
        planes.most_bits = most_bits.data();
        for (std::uint32_t token = 0; token < from.tokens; ++token) write(from, token);
    }
    HostPlanes(const HostPlanes&) = delete;

    static float value_of(const ScaledTokens& from, std::uint32_t token, std::size_t position) {
        const std::size_t at = from.value_at(position);
        return static_cast<const float*>(from.values)[std::size_t{token} * from.width + at] * from.scale[at];
    }

private:
    void write(const ScaledTokens& from, std::uint32_t token) {
        std::uint32_t& most = most_bits[token];
        for (std::uint32_t i = 0; i < from.width; ++i) most = std::max(most, magnitude_bits(value_of(from, token, i)));
        const FixedPoint fixed(most, planes.planes);
        if (!fixed.is_finite()) return;
        for (std::uint32_t part = 0; part < planes.blocks * (kBlockValues / kLaneValues); ++part) {
            LaneBytes own[kMaxPlanes];
            for (std::uint32_t i = 0; i < kLaneValues && part * kLaneValues + i < from.width; ++i) {
                const float value = value_of(from, token, part * kLaneValues + i);
                set_planes(own, i, nearest(fixed.to_integers().times(value)));
            }
            for (std::uint32_t plane = 0; plane < planes.planes; ++plane) {
                std::byte* const block = planes.bytes + planes.offset_of(token / kGroupTokens, plane, part / 4);
                const std::size_t lane = token % kGroupTokens * 4 + part % 4;
                __builtin_memcpy(block + lane * sizeof(LaneBytes), &own[plane], sizeof(LaneBytes));
            }
        }
    }
};

/// mma.m16n8k32 on signed bytes as the manual of PTX lays its operands out.
struct HostTensorWarp : HostWarp {
    template <std::uint32_t kTiles, std::uint32_t kPlaneTiles>
    void multiply_add(const PerLane<RowsOperand>& rows, const PerLane<PlaneTiles<kPlaneTiles>>& planes, unsigned half,
                      PerLane<IntegerSums<kTiles, kPlaneTiles>>& sums, std::uint32_t tile,
                      std::uint32_t plane_tile) const {
        std::int32_t a[16][32];
        std::int32_t b[32][8];
        const auto byte = [](std::uint32_t word, unsigned i) { return static_cast<std::int8_t>(word >> 8 * i); };
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
            for (unsigned i = 0; i < 16; ++i) {
                const unsigned k = lane % 4 * 4 + i % 4 + i / 8 * 16;
                a[lane / 4 + i / 4 % 2 * 8][k] = byte(rows[lane].of[i / 4], i % 4);
            }
            for (unsigned i = 0; i < 8; ++i) {
                const unsigned k = lane % 4 * 4 + i % 4 + i / 4 * 16;
                b[k][lane / 4] = byte(planes[lane].of[plane_tile].of[2 * half + i / 4], i % 4);
            }
        }
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
            for (unsigned i = 0; i < 4; ++i) {
                std::int32_t& sum = sums[lane].of[tile][plane_tile][i];
                for (unsigned k = 0; k < 32; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            }
        }
    }
};

/// Writes what a sum is worth, as the kernels do. `to`: float32.
inline void write_sum(const ScaledSums& to, const PlaneBlocks& planes, std::uint32_t token, std::uint32_t position,
                      std::int64_t sum) {
    if (token >= to.tokens || position >= to.width) return;
    const std::size_t at = to.value_at(position);
    const FixedPoint fixed(planes.most_bits[token], planes.planes);
    static_cast<float*>(to.values)[std::size_t{token} * to.width + at] = fixed.of_sum(sum) * to.scale[at];
}

/// y = T x of decoded rows as a warp of product_cuda.cu and of tun12_cuda.cu adds them.
template <std::uint32_t kPlanes, std::uint32_t kGroups>
void multiply_quads(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& x, const ScaledSums& y,
                    HostTensorWarp warp) {
    constexpr std::uint32_t kPlaneTiles = kPlanes * kGroups;
    for (std::uint32_t group = 0; group < x.groups; group += kGroups) {
        for (std::uint32_t first = 0; first < matrix.rows; first += kWarpRows) {
            HostWarp::PerLane<IntegerSums<kWarpRowTiles, kPlaneTiles>> sums;
            for (std::uint32_t block = 0; block < x.blocks; ++block) {
                const auto word_at = [&](std::uint32_t row, std::uint32_t word) {
                    if (first + row >= matrix.rows) return 0U;
                    return rows.words[(first + row) * rows.stride + block * kBlockWords + word];
                };
                HostWarp::PerLane<BlockOperands<kPlaneTiles>> operands;
                warp.each([&](unsigned lane) {
                    const std::byte* const planes = x.bytes + x.offset_of(group, 0, block);
                    operands[lane] = {RowWords::load(word_at, lane),
                                      PlaneTiles<kPlaneTiles>::load(planes, x.blocks * kBlockBytes, lane)};
                });
                add_rows<kPlaneTiles>(warp, operands, sums);
            }
            warp.each([&](unsigned lane) {
                for_row_sums<kPlanes>(lane, sums[lane],
                                      [&](std::uint32_t row, std::uint32_t token, const auto& planes) {
                                          write_sum(y, x, group * kGroupTokens + token, first + row, joined(planes));
                                      });
            });
        }
    }
}

/// z = T^T g, by the warp of product_cuda.cu that has all rows.
template <std::uint32_t kPlanes>
void multiply_quads_transposed(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& g,
                               const ScaledSums& z, HostTensorWarp warp) {
    for (std::uint32_t group = 0; group < g.groups; ++group) {
        for (std::uint32_t first = 0; first < matrix.columns; first += kWarpColumns) {
            HostWarp::PerLane<IntegerSums<kWarpColumnTiles, kPlanes>> sums;
            for (std::uint32_t block = 0; block < g.blocks; ++block) {
                HostWarp::PerLane<PlaneTiles<kPlanes>> tiles;
                warp.each([&](unsigned lane) {
                    tiles[lane] =
                        PlaneTiles<kPlanes>::load(g.bytes + g.offset_of(group, 0, block), g.blocks * kBlockBytes, lane);
                });
                const auto word_at = [&](std::uint32_t row, std::uint32_t word) {
                    const std::size_t at_row = std::size_t{block} * kBlockValues + row;
                    const std::size_t at_word = first / kValuesOfWord + word;
                    if (at_row >= matrix.rows || at_word >= rows.stride) return 0U;
                    return rows.words[at_row * rows.stride + at_word];
                };
                add_columns<kPlanes>(warp, word_at, tiles, sums);
            }
            warp.each([&](unsigned lane) {
                for_column_sums<kPlanes>(
                    lane, sums[lane], [&](std::uint32_t column, std::uint32_t token, const auto& planes) {
                        write_sum(z, g, group * kGroupTokens + token, first + column, joined(planes));
                    });
            });
        }
    }
}

/// Both products with as many planes as the tokens' type has, and as many groups side by side as the kernels take.
inline void multiply_quads(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& x, const ScaledSums& y,
                           HostTensorWarp warp) {
    const bool is_half = x.planes == kPlanesOfHalf;
    if (x.groups == 1) {
        return is_half ? multiply_quads<kPlanesOfHalf, 1>(matrix, rows, x, y, warp)
                       : multiply_quads<kPlanesOfFloat, 1>(matrix, rows, x, y, warp);
    }
    is_half ? multiply_quads<kPlanesOfHalf, kPairedGroups>(matrix, rows, x, y, warp)
            : multiply_quads<kPlanesOfFloat, kPairedGroups>(matrix, rows, x, y, warp);
}
inline void multiply_quads_transposed(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& g,
                                      const ScaledSums& z, HostTensorWarp warp) {
    g.planes == kPlanesOfHalf ? multiply_quads_transposed<kPlanesOfHalf>(matrix, rows, g, z, warp)
                              : multiply_quads_transposed<kPlanesOfFloat>(matrix, rows, g, z, warp);
}

}  // namespace torch_offload
