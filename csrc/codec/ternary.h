// Ternary matrices as coders take and give them: rows of -1, 0 and +1, one byte each. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torch_offload {

/// A matrix T of -1, 0 and +1. Borrows its values.
struct TernaryView {
    const std::int8_t* values = nullptr;  // [rows, columns], row-major
    std::size_t rows = 0;
    std::size_t columns = 0;

    const std::int8_t* row(std::size_t index) const noexcept { return values + index * columns; }
    TernaryView rows_from(std::size_t first, std::size_t count) const noexcept { return {row(first), count, columns}; }
};

/// Where a decoder puts rows of T. Behind a row's columns there is room for kRowSlack bytes, which it may overwrite.
struct TernaryRows {
    std::int8_t* values = nullptr;  // [rows, stride]
    std::size_t stride = 0;         // bytes from one row to the next, at least columns + kRowSlack

    std::int8_t* row(std::size_t index) const noexcept { return values + index * stride; }
};
inline constexpr std::size_t kRowSlack = 128;

/// How often each value occurs among `total` values.
struct TernaryCounts {
    std::uint64_t zeros = 0;
    std::uint64_t pluses = 0;
    std::uint64_t total = 0;
};

inline constexpr std::size_t kQuad = 4;  // consecutive values of one row that make one symbol

/// The code of four values: two bits each, the first lowest, in two's complement (0, 1, 3).
/// A product puts the two low bits of each byte side by side; no two of its terms meet.
constexpr std::uint32_t quad_code(std::uint32_t four_bytes) noexcept {
    const std::uint64_t bits = four_bytes & 0x03030303U;
    return static_cast<std::uint32_t>(bits * 0x41041U >> 18) & 0xFFU;
}

/// The inverse of `quad_code`.
constexpr std::uint32_t quad_bytes(std::uint32_t code) noexcept {
    std::uint32_t bytes = 0;
    for (std::uint32_t i = 0; i < kQuad; ++i) {
        const std::uint32_t two = code >> (2 * i) & 3U;
        bytes |= (two == 3 ? 0xFFU : two) << (8 * i);
    }
    return bytes;
}

/// The code of values [column, column + 4) of a row; those behind its end are zero.
inline std::uint32_t quad_at(const std::int8_t* row, std::size_t column, std::size_t columns) noexcept {
    std::uint32_t four_bytes = 0;
    std::memcpy(&four_bytes, row + column, columns - column < kQuad ? columns - column : kQuad);
    return quad_code(four_bytes);
}

}  // namespace torch_offload
