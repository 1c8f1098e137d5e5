// Sums of a transposed product while rows are added to them. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/token_planes.h"

namespace torch_offload {

/// For each column, the sum over rows of T + 1 times the bytes of each plane of each token: integers, so rows may come
/// in any order and parts of them be added to one another.
/// Threads: one at a time.
class ColumnSums {
public:
    static constexpr std::size_t kColumns = 64;  // of a block

    /// No rows yet.
    ColumnSums(std::size_t tokens, unsigned planes, std::size_t columns);

    std::size_t tokens() const noexcept { return tokens_; }
    unsigned planes() const noexcept { return planes_; }
    std::size_t columns() const noexcept { return columns_; }
    /// Sums of columns from `index` kColumns on: [tokens, planes, kColumns].
    std::int32_t* block(std::size_t index) noexcept { return sums_.data() + index * tokens_ * planes_ * kColumns; }
    /// Says that so many rows are about to be added. Pre: at most kMaxRowsAtOnce.
    void expect_rows(std::size_t count);
    /// Pre: of the same tokens, planes and columns.
    void add(const ColumnSums& part);
    /// `g`: the tokens that were multiplied, all of whose rows have been added. `z`: tokens of columns() floats.
    void write(const TokenPlanes& g, TokenPanel& z) const noexcept;

    /// A row adds no more than 2 times 128 to a sum of 32 bits.
    static constexpr std::size_t kMaxRowsAtOnce = std::size_t{1} << 22;

private:
    void widen();
    /// Adds `sums_` to `wide`.
    void add_narrow(std::vector<std::int64_t>& wide) const noexcept;

    std::size_t tokens_;
    unsigned planes_;
    std::size_t columns_;
    std::size_t rows_ = 0;            // in sums_
    std::vector<std::int32_t> sums_;  // [blocks, tokens, planes, kColumns]
    std::vector<std::int64_t> wide_;  // [blocks, tokens, kColumns], planes joined; empty until sums_ might overflow
};

}  // namespace torch_offload
