#include "codec/column_sums.h"

#include <algorithm>

namespace torch_offload {

ColumnSums::ColumnSums(std::size_t tokens, unsigned planes, std::size_t columns)
    : tokens_(tokens),
      planes_(planes),
      columns_(columns),
      sums_((columns + kColumns - 1) / kColumns * tokens * planes * kColumns) {}

void ColumnSums::expect_rows(std::size_t count) {
    if (rows_ + count > kMaxRowsAtOnce) widen();
    rows_ += count;
}

void ColumnSums::add(const ColumnSums& part) {
    if (!part.wide_.empty() || rows_ + part.rows_ > kMaxRowsAtOnce) {
        widen();
        part.add_narrow(wide_);
        for (std::size_t i = 0; i < part.wide_.size(); ++i) wide_[i] += part.wide_[i];
        return;
    }
    rows_ += part.rows_;
    for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] += part.sums_[i];
}

void ColumnSums::write(const TokenPlanes& g, TokenPanel& z) const noexcept {
    for (std::size_t column = 0; column < columns_; ++column) {
        for (std::size_t token = 0; token < tokens_; ++token) {
            const std::size_t of_token = column / kColumns * tokens_ + token;
            const std::int32_t* const sums = sums_.data() + of_token * planes_ * kColumns + column % kColumns;
            std::int64_t sum = wide_.empty() ? 0 : wide_[of_token * kColumns + column % kColumns];
            for (unsigned plane = 0; plane < planes_; ++plane) {
                sum += static_cast<std::int64_t>(sums[plane * kColumns]) * (std::int64_t{1} << 8 * plane);
            }
            const PlanedToken& planed = g.token(token);
            z.token(token)[column] = planed.point.of_sum(sum - planed.total);
        }
    }
}

void ColumnSums::widen() {
    wide_.resize(sums_.size() / planes_);
    add_narrow(wide_);
    std::ranges::fill(sums_, 0);
    rows_ = 0;
}

void ColumnSums::add_narrow(std::vector<std::int64_t>& wide) const noexcept {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
        const std::size_t plane = i / kColumns % planes_;
        wide[i / kColumns / planes_ * kColumns + i % kColumns] +=
            static_cast<std::int64_t>(sums_[i]) * (std::int64_t{1} << 8 * plane);
    }
}

}  // namespace torch_offload
