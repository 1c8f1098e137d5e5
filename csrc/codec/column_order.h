// The order in which an extent has its columns: those of like odds side by side. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/column_class.h"
#include "codec/ternary.h"

namespace torch_offload {

/// Of each column of the matrix its class, 1, 2 or 4 bits for each, the first in the low bits of the first byte.
/// Columns of one class keep their order among each other. With 0 bits there is nothing to say: columns lie as they do
/// in the matrix.
struct ColumnOrder {
    unsigned bits = 0;
    std::vector<std::byte> packed;

    static std::size_t packed_bytes(std::size_t columns, unsigned bits) noexcept { return (columns * bits + 7) / 8; }
    std::size_t class_of(std::size_t column) const noexcept {
        const std::size_t bit = column * bits;
        return std::to_integer<std::size_t>(packed[bit / 8]) >> bit % 8 & ((std::size_t{1} << bits) - 1);
    }
};

/// Classes, and which columns are in them.
struct SortedColumns {
    ColumnClasses classes;
    ColumnOrder order;
};

/// Puts columns into up to `most_classes` classes of about as many columns each, by how many zeros they have.
/// Pre: 1 <= most_classes <= kMaxClasses.
SortedColumns sorted_columns(const TernaryView& matrix, std::size_t most_classes);

/// Whether so many bits say a class, and each class has as many columns as `classes` says.
bool fits(const ColumnOrder& order, const ColumnClasses& classes, std::size_t columns) noexcept;

/// The column of the matrix that lies in each position, [columns]; empty if all lie in their own.
/// Pre: fits(order, classes, columns).
std::vector<std::uint32_t> columns_in_order(const ColumnOrder& order, const ColumnClasses& classes,
                                            std::size_t columns);

}  // namespace torch_offload
