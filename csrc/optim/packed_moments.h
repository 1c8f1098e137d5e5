// A moment in 8 bits per element: blocks of kPackedBlock bytes, one per element, with the block's scale inside of them.
// Layer optim, without torch: includes nothing of this project.
//
// A byte is an index into levels between 0 and 1; its value is level * scale, the scale being the largest magnitude of
// the block. Level 0 is 0. Of the other indices the number of leading zeros chooses a decade and the rest divides it
// evenly: with b bits, index 2^i + f is 10^(i - b + 1) * (0.1 + 0.9 (f + 1) / 2^i). Values go to the nearest level,
// to 0 below 0.55 of the lowest. First moments have a sign and 7 bits, second moments 8 bits and at least the lowest
// level unless they are zero: a step is divided by their root.
//
// The scale's 32 bits take the lowest bit of the block's first 32 bytes, from the lowest up; of an index there only odd
// values and 0 occur. So a block is complete in itself: pages that hold whole blocks hold their scales. Bytes of zeros
// are zeros. Packing what was unpacked changes nothing, unless the scale is below 1e-30. A block with a value that is
// not finite becomes not-a-number as a whole.
//
// Source: dynamic tree quantization by blocks, Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
// arXiv 2110.02861. Theirs keeps scales apart and levels in the middle of their intervals instead of at the upper end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_offload {

inline constexpr std::size_t kPackedBlock = 2048;
inline constexpr std::size_t kScaleBits = 32;

/// first: signed. second: never negative.
enum class Moment : std::uint8_t { first, second };

constexpr std::size_t packed_size(std::size_t count) noexcept {
    return (count + kPackedBlock - 1) / kPackedBlock * kPackedBlock;
}

/// Levels of an index of `kBits` bits.
template <int kBits>
struct PackedLevels {
    float values[1 << kBits] = {};

    constexpr PackedLevels() {
        double decade = 1;
        for (int i = kBits - 1; i >= 0; --i, decade /= 10) {
            const int steps = 1 << i;
            for (int f = 0; f < steps; ++f) {
                values[steps + f] = static_cast<float>(decade * (0.1 + 0.9 * (f + 1) / steps));
            }
        }
    }
};
inline constexpr PackedLevels<7> kFirstLevels;
inline constexpr PackedLevels<8> kSecondLevels;

/// `values`: [count], `packed`: [packed_size(count)] that ends with zeros where there is no value.
void pack_moment(Moment moment, const float* values, std::size_t count, std::uint8_t* packed) noexcept;
void unpack_moment(Moment moment, const std::uint8_t* packed, std::size_t count, float* values) noexcept;

}  // namespace torch_offload
