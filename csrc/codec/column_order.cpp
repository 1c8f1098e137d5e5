#include "codec/column_order.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace torch_offload {
namespace {

/// The fewest that tell so many classes apart; a byte has whole ones.
unsigned bits_for(std::size_t classes) noexcept {
    if (classes <= 1) return 0;
    if (classes <= 2) return 1;
    return classes <= 4 ? 2 : 4;
}

std::vector<std::size_t> nonzeros_of_columns(const TernaryView& matrix) {
    std::vector<std::size_t> counts(matrix.columns);
    for (std::size_t row = 0; row < matrix.rows; ++row) {
        const std::int8_t* const values = matrix.row(row);
        for (std::size_t column = 0; column < matrix.columns; ++column) counts[column] += values[column] != 0;
    }
    return counts;
}

}  // namespace

SortedColumns sorted_columns(const TernaryView& matrix, std::size_t most_classes) {
    const std::size_t count = std::min(most_classes, matrix.columns);
    SortedColumns sorted;
    for (std::size_t i = 0; i < count; ++i) sorted.classes.push_back({i * matrix.columns / count});
    ColumnOrder& order = sorted.order;
    order.bits = bits_for(count);
    if (order.bits == 0) return sorted;
    const std::vector<std::size_t> nonzeros = nonzeros_of_columns(matrix);
    std::vector<std::size_t> by_odds(matrix.columns);
    std::iota(by_odds.begin(), by_odds.end(), std::size_t{0});
    std::ranges::stable_sort(by_odds, {}, [&](std::size_t column) { return nonzeros[column]; });
    order.packed.resize(ColumnOrder::packed_bytes(matrix.columns, order.bits));
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t end = end_column(sorted.classes, i, matrix.columns);
        for (std::size_t position = sorted.classes[i].first_column; position < end; ++position) {
            const std::size_t bit = by_odds[position] * order.bits;
            order.packed[bit / 8] |= static_cast<std::byte>(i << bit % 8);
        }
    }
    return sorted;
}

bool fits(const ColumnOrder& order, const ColumnClasses& classes, std::size_t columns) noexcept {
    if (order.bits > 2 && order.bits != 4) return false;
    if (order.packed.size() != ColumnOrder::packed_bytes(columns, order.bits)) return false;
    if (order.bits == 0) return true;
    std::array<std::size_t, kMaxClasses> counts{};
    for (std::size_t column = 0; column < columns; ++column) ++counts[order.class_of(column)];
    for (std::size_t i = 0; i < counts.size(); ++i) {
        const std::size_t expected =
            i < classes.size() ? end_column(classes, i, columns) - classes[i].first_column : std::size_t{0};
        if (counts[i] != expected) return false;
    }
    return true;
}

std::vector<std::uint32_t> columns_in_order(const ColumnOrder& order, const ColumnClasses& classes,
                                            std::size_t columns) {
    if (order.bits == 0) return {};
    std::array<std::size_t, kMaxClasses> positions{};
    for (std::size_t i = 0; i < classes.size(); ++i) positions[i] = classes[i].first_column;
    std::vector<std::uint32_t> in_order(columns);
    for (std::size_t column = 0; column < columns; ++column) {
        in_order[positions[order.class_of(column)]++] = static_cast<std::uint32_t>(column);
    }
    return in_order;
}

}  // namespace torch_offload
