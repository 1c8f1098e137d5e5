// The loops of y = T x that pass over the zeros of T: each other value adds or takes away a column of the tokens'
// integers. Internal linkage, no standard headers. Layer codec: includes base only.
//
// Lanes::list() makes the lists of some columns; Lanes::kMinTokens is how many tokens pay for that.
#pragma once

#include "codec/product_kernels.h"

namespace torch_offload {
namespace {

// One register or several, whatever the processor has.
using Narrow8 [[gnu::vector_size(32), gnu::may_alias]] = std::int32_t;
using Narrow16 [[gnu::vector_size(64), gnu::may_alias]] = std::int32_t;
using Wide8 [[gnu::vector_size(64), gnu::may_alias]] = std::int64_t;

constexpr std::size_t kColumnsOfList = 4096;
constexpr std::size_t kTokensOfRow = 64;  // that a list is used for
/// Sums of 32 bits hold so many integers of three planes, which are 2^22 at most, with room for their difference.
constexpr std::size_t kMaxListed = 255;
constexpr std::size_t kColumnsAsked = 512;
constexpr std::size_t kSparseFromZeros = 4;  // no more than one value in so many is not zero

/// Columns of one sign, from the first column of a block.
struct ColumnList {
    std::size_t count = 0;
    std::uint16_t columns[kColumnsOfList + 64];  // whole vectors may be written behind the last one
};

struct ColumnLists {
    ColumnList plus;
    ColumnList minus;
};

template <typename Vector>
inline void sum_listed(const ColumnList& list, std::size_t first, const Vector* columns, Vector& sum) noexcept {
    const std::size_t end = list.count - first < kMaxListed ? list.count : first + kMaxListed;
    Vector sums[4] = {};
    std::size_t i = first;
    for (; i + 4 <= end; i += 4) {
#pragma GCC unroll 4
        for (std::size_t k = 0; k < 4; ++k) sums[k] += columns[list.columns[i + k]];
    }
    for (; i < end; ++i) sums[0] += columns[list.columns[i]];
    sum = sums[0] + sums[1] + (sums[2] + sums[3]);
}

/// Adds a group's sums of a block. `totals`: of its tokens.
template <typename Vector, std::size_t kLanes>
inline void add_group(const ColumnLists& lists, const std::byte* columns, std::int64_t* totals) noexcept {
    const auto* const table = reinterpret_cast<const Vector*>(columns);
    for (std::size_t first = 0; first < lists.plus.count || first < lists.minus.count; first += kMaxListed) {
        Vector plus{};
        Vector minus{};
        if (first < lists.plus.count) sum_listed(lists.plus, first, table, plus);
        if (first < lists.minus.count) sum_listed(lists.minus, first, table, minus);
        plus -= minus;
        for (std::size_t i = 0; i < kLanes; ++i) totals[i] += plus[i];
    }
}

/// Some tokens of a row. `totals`: [token_count], rounded up to groups.
template <typename Lanes>
inline void add_row(const std::int8_t* row, std::size_t column_count, const TokenColumns& x, std::size_t first_token,
                    std::size_t token_count, std::int64_t* totals) noexcept {
    ColumnLists lists;
    for (std::size_t column = 0; column < column_count; column += kColumnsOfList) {
        const std::size_t left = column_count - column;
        Lanes::list(row + column, left < kColumnsOfList ? left : kColumnsOfList, lists);
        for (std::size_t token = 0; token < token_count; token += x.lanes()) {
            const std::byte* const columns = x.column((first_token + token) / x.lanes(), column);
            if (x.is_wide()) {
                add_group<Wide8, 8>(lists, columns, totals + token);
            } else if (x.lanes() == 8) {
                add_group<Narrow8, 8>(lists, columns, totals + token);
            } else {
                add_group<Narrow16, 16>(lists, columns, totals + token);
            }
        }
    }
}

template <typename Lanes>
inline void multiply_sparse_rows(const ProductRows& rows, const TokenPlanes& x, TokenPanel& y) noexcept {
    for (std::size_t first = 0; first < x.tokens(); first += kTokensOfRow) {
        const std::size_t left = x.tokens() - first;
        const std::size_t count = left < kTokensOfRow ? left : kTokensOfRow;
        for (std::size_t row = 0; row < rows.count; ++row) {
            std::int64_t totals[kTokensOfRow] = {};
            add_row<Lanes>(rows.values + row * rows.stride, rows.columns, x.columns(), first, count, totals);
            for (std::size_t t = 0; t < count; ++t) {
                y.token(first + t)[rows.first_row + row] = x.token(first + t).point.of_sum(totals[t]);
            }
        }
    }
}

/// What the first values say: which way sums are made changes nothing but the time.
inline bool is_sparse(const ProductRows& rows) noexcept {
    const std::size_t count = rows.columns < kColumnsAsked ? rows.columns : kColumnsAsked;
    std::size_t others = 0;
    for (std::size_t i = 0; i < count; ++i) others += static_cast<std::size_t>(rows.values[i] & 1);
    return others * kSparseFromZeros <= count;
}

}  // namespace
}  // namespace torch_offload
