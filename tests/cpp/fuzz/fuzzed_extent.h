// What fuzz targets do with bytes: make an extent of them, and find out whether code keeps to its limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codec/coded_matrix.h"

namespace torch_offload {

/// Bytes filled up to an extent, in memory that ends where the extent does. The first byte says what is put right, so
/// that most inputs get past the checks of the numbers that no mutation guesses.
class FuzzedExtent {
public:
    explicit FuzzedExtent(std::span<const std::uint8_t> input);

    std::span<const std::byte> bytes() const noexcept { return buffer_.bytes(); }

private:
    ExtentBuffer buffer_;
};

/// Bits of the first byte: what is put right.
inline constexpr std::uint8_t kRepairsChecksum = 1;
inline constexpr std::uint8_t kRepairsSizes = 2;

/// Ends the program, which is how a fuzzer is told, if a claim does not hold.
void require(bool holds, std::string_view claim);

/// Watches how much memory this thread asks for from here on, given back or not. One at a time.
class AllocationLimit {
public:
    explicit AllocationLimit(std::size_t most_bytes);
    ~AllocationLimit();

    AllocationLimit(const AllocationLimit&) = delete;
    AllocationLimit& operator=(const AllocationLimit&) = delete;
};

/// Twice the file, and what the words of an error take.
std::size_t most_bytes_of_header(std::span<const std::byte> extent);
/// And the tables of each class, of which there are few.
std::size_t most_bytes_of_opening(std::span<const std::byte> extent);

}  // namespace torch_offload
