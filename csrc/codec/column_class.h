// Columns that are coded with the same probabilities. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/ternary.h"

namespace torch_offload {

inline constexpr std::size_t kMaxClasses = 16;

/// Columns from `first_column` to that of the next class. A codeword or symbol belongs to the class of its first
/// column, wherever it ends.
struct ColumnClass {
    std::size_t first_column = 0;
};
/// At least one; the first begins at column 0, and each next one further right, inside the matrix.
using ColumnClasses = std::vector<ColumnClass>;

inline std::size_t end_column(const ColumnClasses& classes, std::size_t index, std::size_t columns) noexcept {
    return index + 1 < classes.size() ? classes[index + 1].first_column : columns;
}

}  // namespace torch_offload
