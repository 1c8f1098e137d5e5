// Tokens as planes of bytes (fixed_point.h), laid out as integer tensor cores take them. Layer codec: includes base
// only.
//
// Eight tokens are a group, 64 values of each a block: 512 bytes for each plane, of which lane 4 g + t of a warp reads
// 16, those of token g's values from 16 t on. Value i of these is byte i / 2 % 4 of word 2 (i % 2) + i / 8: the order
// in which the values of a word of QuadRows come apart (integer_products.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/fixed_point.h"

namespace torch_offload {

inline constexpr std::uint32_t kGroupTokens = 8;
inline constexpr std::uint32_t kBlockValues = 64;
inline constexpr std::uint32_t kLaneValues = 16;
inline constexpr std::size_t kBlockBytes = kGroupTokens * kBlockValues;

enum class TokenType : std::uint8_t { float32, bfloat16, float16 };

constexpr unsigned planes_of(TokenType type) noexcept {
    return type == TokenType::float32 ? kPlanesOfFloat : kPlanesOfHalf;
}

/// Tokens that are multiplied by one factor per position before they go into a product, or after they come out of it.
template <typename Values>
struct Scaled {
    Values* values = nullptr;  // [tokens, width] of the type
    TokenType type = TokenType::float32;
    const float* scale = nullptr;  // [width]
    /// [width]: which of a token's values is in each position of the product; nullptr if all are in their own.
    const std::uint32_t* order = nullptr;
    std::uint32_t tokens = 0;
    std::uint32_t width = 0;

    OFFLOAD_HOST_DEVICE std::size_t value_at(std::size_t position) const noexcept {
        return order ? order[position] : position;
    }
};
using ScaledTokens = Scaled<const void>;
using ScaledSums = Scaled<void>;

/// The planes of some tokens, in the memory that kernels read.
struct PlaneBlocks {
    std::byte* bytes = nullptr;          // [groups, planes, blocks, 512]; zeros for what there is not
    std::uint32_t* most_bits = nullptr;  // [8 groups]: FixedPoint takes them
    std::uint32_t groups = 0;
    std::uint32_t planes = 0;
    std::uint32_t blocks = 0;  // of 64 values

    OFFLOAD_HOST_DEVICE std::size_t offset_of(std::uint32_t group, std::uint32_t plane,
                                              std::uint32_t block) const noexcept {
        return ((std::size_t{group} * planes + plane) * blocks + block) * kBlockBytes;
    }
    std::size_t size_bytes() const noexcept { return offset_of(groups, 0, 0); }
};

/// Groups that a warp multiplies side by side, if there is more than one.
inline constexpr std::uint32_t kPairedGroups = 2;

/// Without pointers: all groups of some tokens, filled up to whole pairs.
constexpr PlaneBlocks plane_blocks_for(std::uint32_t tokens, std::uint32_t width, TokenType type) noexcept {
    const std::uint32_t groups = (tokens + kGroupTokens - 1) / kGroupTokens;
    return {nullptr, nullptr, groups > 1 ? (groups + 1) / kPairedGroups * kPairedGroups : groups, planes_of(type),
            (width + kBlockValues - 1) / kBlockValues};
}

/// The nearest integer, of two the even one. Pre: it is one of 32 bits.
OFFLOAD_HOST_DEVICE inline std::int32_t nearest(float value) noexcept {
#ifdef __CUDA_ARCH__
    return __float2int_rn(value);
#else
    return static_cast<std::int32_t>(__builtin_nearbyintf(value));
#endif
}

/// What a lane reads of one plane.
struct LaneBytes {
    std::uint32_t of[4] = {};
};

/// Adds value `index` of 16 to the planes' bytes.
OFFLOAD_HOST_DEVICE inline void set_planes(LaneBytes (&to)[kMaxPlanes], std::uint32_t index, std::int32_t integer) {
    OFFLOAD_UNROLL
    for (unsigned plane = 0; plane < kMaxPlanes; ++plane) {
        const auto byte = static_cast<std::uint8_t>(plane_of(integer, plane));
        to[plane].of[index % 2 * 2 + index / 8] |= std::uint32_t{byte} << index / 2 % 4 * 8;
    }
}

}  // namespace torch_offload
