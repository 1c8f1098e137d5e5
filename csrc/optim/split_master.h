// An fp32 master weight as two halves: the bf16 weight that the model computes with, and 16 bits that no one else
// needs. Layer optim, without torch.
//
// The weight is the master's top half, rounded to nearest: ties go away from zero. The low half is the master's lower
// 16 bits as they are. Rounding carries into the top half exactly where bit 15 is set, so reading the low half as a
// signed number undoes it:
//
//     weight = (master + 0x8000) >> 16        low = master & 0xFFFF
//     master = (weight << 16) + signed(low)
//
// Ties away, because that is the nearest rounding under which each weight stands for exactly 2^16 masters. With ties to
// even, an even weight stands for 2^16 + 1 masters and an odd one for 2^16 - 1, which no 16 bits can tell apart.
// Not-a-numbers become one (0x7FC00000), so that none turns into an infinity or a zero where its payload is cut.
// Source: halves as in Split-SGD-BF16, Kalamkar et al., arXiv 2005.04680, which cuts the top half off instead.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace torch_offload {

inline constexpr std::uint32_t kCanonicalNan = 0x7FC00000;

struct SplitMaster {
    std::uint16_t weight;  // bf16
    std::int16_t low;
};

OFFLOAD_HOST_DEVICE constexpr bool is_nan_bits(std::uint32_t bits) noexcept { return (bits & 0x7FFFFFFF) > 0x7F800000; }

OFFLOAD_HOST_DEVICE constexpr std::uint32_t with_canonical_nan(std::uint32_t bits) noexcept {
    return is_nan_bits(bits) ? kCanonicalNan : bits;
}

OFFLOAD_HOST_DEVICE constexpr SplitMaster split_master(std::uint32_t master_bits) noexcept {
    const std::uint32_t bits = with_canonical_nan(master_bits);
    return {static_cast<std::uint16_t>((bits + 0x8000) >> 16), static_cast<std::int16_t>(bits & 0xFFFF)};
}

OFFLOAD_HOST_DEVICE constexpr std::uint32_t join_master(SplitMaster halves) noexcept {
    const auto offset = static_cast<std::uint32_t>(static_cast<std::int32_t>(halves.low));
    return (static_cast<std::uint32_t>(halves.weight) << 16) + offset;
}

}  // namespace torch_offload
