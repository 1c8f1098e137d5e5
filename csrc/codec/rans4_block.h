// The walk of RANS4's vector kernels over a block of rows that is coded, compiled once per instruction set: internal
// linkage, no standard headers. Layer codec: includes base only.
#pragma once

#include "codec/rans4.h"

namespace torch_offload {
namespace {

constexpr std::size_t kQuadsAtOnce = 4;
constexpr std::size_t kColumnsAtOnce = kQuadsAtOnce * kQuad;

/// For quotients below 2^20 in floats. The dividend, its product with this and the quotient are each rounded, whichever
/// way, by less than a part in 2^23; so the quotient is too small, by one at most when it has been cut to an integer.
constexpr float kLessThanOne = 1 - 1.0F / (1 << 21);

/// kColumnsAtOnce values of each lane. Lanes are numbered as in RansGrowth: from the last row to the first.
struct RansRows {
    const std::int8_t* first = nullptr;
    std::ptrdiff_t step = 0;

    const std::int8_t* at(std::size_t lane) const noexcept { return first + static_cast<std::ptrdiff_t>(lane) * step; }
};

/// The tables of up to four quads side by side.
struct QuadTables {
    const std::uint32_t* intervals[kQuadsAtOnce] = {};
    std::size_t count = 0;
};

/// The same values where all lanes have them: zeros take the place of rows and columns that there are not.
struct PaddedRows {
    alignas(64) std::int8_t values[kRansLanes][kColumnsAtOnce];

    RansRows copied(const TernaryView& rows, std::size_t column) noexcept {
        const std::size_t left = rows.columns - column;
        __builtin_memset(values, 0, sizeof(values));
        for (std::size_t i = 0; i < rows.rows; ++i) {
            __builtin_memcpy(values[kRansLanes - 1 - i], rows.row(i) + column,
                             left < kColumnsAtOnce ? left : kColumnsAtOnce);
        }
        return {values[0], kColumnsAtOnce};
    }
};

/// Has `take` code kColumnsAtOnce columns at a time, the last ones first.
template <typename Take>
inline void for_quads_backwards(const RansColumns<RansIntervals>& columns, const TernaryView& rows,
                                Take take) noexcept {
    PaddedRows padded;
    QuadTables tables;
    std::size_t index = columns.classes.size() - 1;
    for (std::size_t end = columns.quad_count(); end > 0;) {
        const std::size_t begin = (end - 1) / kQuadsAtOnce * kQuadsAtOnce;
        tables.count = end - begin;
        for (std::size_t quad = end; quad-- > begin;) {
            while (index > 0 && quad < columns.end_quad(index - 1)) --index;
            tables.intervals[quad - begin] = columns.tables[index].data();
        }
        const std::size_t column = begin * kQuad;
        const bool is_whole = rows.rows == kRansLanes && column + kColumnsAtOnce <= rows.columns;
        const auto stride = static_cast<std::ptrdiff_t>(rows.columns);
        take(is_whole ? RansRows{rows.row(kRansLanes - 1) + column, -stride} : padded.copied(rows, column), tables);
        end = begin;
    }
}

}  // namespace
}  // namespace torch_offload
