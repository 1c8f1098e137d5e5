// Units and rounding. Layer base: includes nothing of this project.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_offload {

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;

/// Smallest unit of direct I/O and of mapping.
inline constexpr std::size_t kSectorBytes = 4 * kKiB;

/// Size of the huge page that the kernel may use where alignment allows it.
inline constexpr std::size_t kHugePageBytes = 2 * kMiB;

/// Pre: `unit` is not 0.
constexpr std::size_t round_up(std::size_t value, std::size_t unit) noexcept {
    return (value + unit - 1) / unit * unit;
}

/// Pre: `unit` is not 0.
constexpr std::size_t divide_up(std::size_t value, std::size_t unit) noexcept { return (value + unit - 1) / unit; }

}  // namespace torch_offload
