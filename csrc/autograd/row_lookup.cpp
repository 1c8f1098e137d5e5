#include "autograd/row_lookup.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include "autograd/forked_child.h"
#include "autograd/managed_arguments.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMinPages = 4;       // of a table, below which it comes as a whole
constexpr std::size_t kShareOfLookup = 8;  // of the budget, that pages of one lookup take at once

// weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
constexpr std::size_t kBagArguments = 9;
constexpr std::size_t kBagMode = 4;
constexpr std::size_t kBagPadding = 8;
constexpr std::int64_t kBagMaximum = 2;

/// A row that was asked for, and where in the result it belongs.
struct Asked {
    std::size_t row = 0;
    std::size_t place = 0;
};

/// Where the rows of a table lie in its segment.
struct Table {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Segment> segment;
    const std::byte* begin = nullptr;  // of row 0
    std::size_t begin_byte = 0;        // the same, in the segment
    std::size_t row_bytes = 0;
    std::size_t stride_bytes = 0;  // from row to row
    std::size_t row_count = 0;

    PageRange pages_of(std::size_t row) const noexcept {
        const std::size_t first_byte = begin_byte + row * stride_bytes;
        const std::size_t first = first_byte / segment->page_bytes();
        return {first, (first_byte + row_bytes - 1) / segment->page_bytes() - first + 1};
    }
};

bool needs_graph(const at::Tensor& weight) {
    return (at::GradMode::is_enabled() && weight.requires_grad()) || weight._fw_grad(/*level=*/0).defined();
}

bool is_table(const at::Tensor& weight) {
    return weight.device().is_cpu() && weight.dim() == 2 && weight.size(1) > 0 && weight.stride(1) == 1 &&
           weight.stride(0) >= weight.size(1) && !weight.is_neg() && !weight.is_conj() && !needs_graph(weight);
}

bool are_indices(const at::Tensor& indices) {
    const bool is_integer = indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt;
    return indices.device().is_cpu() && is_integer && indices.numel() > 0 && !block_of(indices);
}

/// The table whose rows may answer the call; none where the call must run as it is.
std::optional<Table> table_of(const at::Tensor& weight, const at::Tensor& indices, c10::DispatchKeySet keys) {
    const Block* const block = block_of(weight);
    if (!block || !is_plain_call(keys) || in_forked_child() || !is_table(weight) || !are_indices(indices)) return {};
    if (block->segment->page_count() < kMinPages || block->segment->has_pending()) return {};
    const auto element_bytes = static_cast<std::size_t>(weight.element_size());
    Table table;
    table.engine = block->engine;
    table.segment = block->segment;
    table.begin_byte = static_cast<std::size_t>(weight.storage_offset()) * element_bytes;
    table.begin = static_cast<const std::byte*>(weight.storage().data()) + table.begin_byte;
    table.row_bytes = static_cast<std::size_t>(weight.size(1)) * element_bytes;
    table.stride_bytes = static_cast<std::size_t>(weight.stride(0)) * element_bytes;
    table.row_count = static_cast<std::size_t>(weight.size(0));
    return table;
}

/// In the order of rows; empty if the table does not have one of them.
std::vector<Asked> asked_rows(const at::Tensor& indices, const Table& table) {
    const at::Tensor wide = indices.to(at::kLong).contiguous();
    const std::int64_t* const rows = wide.const_data_ptr<std::int64_t>();
    std::vector<Asked> asked(static_cast<std::size_t>(wide.numel()));
    for (std::size_t i = 0; i < asked.size(); ++i) {
        asked[i] = {static_cast<std::size_t>(rows[i]), i};  // below zero: beyond the end
        if (asked[i].row >= table.row_count) return {};
    }
    std::sort(asked.begin(), asked.end(), [](const Asked& a, const Asked& b) { return a.row < b.row; });
    return asked;
}

/// Pins pages of some rows after each other, as many as a share of the budget holds, and copies the rows.
class RowCopy {
public:
    RowCopy(const Table& table, std::byte* result) : table_(table), result_(result) {
        const std::size_t share_bytes = table.engine->pager().options().budget_bytes / kShareOfLookup;
        most_pages_ = std::max<std::size_t>(1, share_bytes / table.segment->page_bytes());
    }

    void copy(const std::vector<Asked>& asked) {
        for (auto next = asked.begin(); next != asked.end();) {
            const auto begin = next;
            while (next != asked.end() && take(next->row)) ++next;
            const PinGuard guard = table_.engine->pin_ranges(table_.segment, ranges_, Access::read);
            for (auto row = begin; row != next; ++row) {
                std::memcpy(result_ + row->place * table_.row_bytes, table_.begin + row->row * table_.stride_bytes,
                            table_.row_bytes);
            }
            ranges_.clear();
            page_count_ = 0;
        }
    }

private:
    /// False if the pages are full. Pre: rows come in order.
    bool take(std::size_t row) {
        const PageRange pages = table_.pages_of(row);
        const std::size_t end = pages.first + pages.count;
        const std::size_t known_end = ranges_.empty() ? pages.first : ranges_.back().first + ranges_.back().count;
        if (end <= known_end) return true;
        const std::size_t added = end - std::max(pages.first, known_end);
        if (!ranges_.empty() && page_count_ + added > most_pages_) return false;
        page_count_ += added;
        if (!ranges_.empty() && pages.first <= known_end) {
            ranges_.back().count = end - ranges_.back().first;
        } else {
            ranges_.push_back(pages);
        }
        return true;
    }

    const Table& table_;
    std::byte* const result_;
    std::size_t most_pages_ = 0;
    std::vector<PageRange> ranges_;
    std::size_t page_count_ = 0;
};

/// Of rows in their order, each one once; its place is its number.
std::vector<Asked> distinct_rows(const std::vector<Asked>& asked) {
    std::vector<Asked> distinct;
    for (const Asked& one : asked) {
        if (distinct.empty() || distinct.back().row != one.row) distinct.push_back({one.row, distinct.size()});
    }
    return distinct;
}

/// Which of the distinct rows it is; their count, if it is none of them.
std::int64_t place_among(const std::vector<Asked>& distinct, std::size_t row) {
    const auto found = std::lower_bound(distinct.begin(), distinct.end(), row,
                                        [](const Asked& one, std::size_t wanted) { return one.row < wanted; });
    const bool is_there = found != distinct.end() && found->row == row;
    return is_there ? found - distinct.begin() : std::ssize(distinct);
}

/// The same of all that were asked for, in the order of the indices: [count] int64.
at::Tensor places_among(const std::vector<Asked>& distinct, const std::vector<Asked>& asked) {
    at::Tensor places = at::empty({std::ssize(asked)}, at::kLong);
    std::int64_t* const place = places.mutable_data_ptr<std::int64_t>();
    auto known = distinct.begin();
    for (const Asked& one : asked) {
        while (known->row != one.row) ++known;
        place[one.place] = known - distinct.begin();
    }
    return places;
}

bool selects_rows(const at::Tensor& table, std::int64_t dimension) {
    return dimension == 0 || dimension == -table.dim();
}

}  // namespace

bool try_look_up_rows(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
    const std::size_t argument_count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments = torch::jit::last(*stack, argument_count);
    const bool is_selection = traits.kind == OperatorKind::row_select;
    const at::Tensor weight = arguments[0].toTensor();
    const at::Tensor indices = arguments[is_selection ? 2 : 1].toTensor();
    if (is_selection && !(selects_rows(weight, arguments[1].toInt()) && indices.dim() <= 1)) return false;
    const std::optional<Table> table = table_of(weight, indices, keys);
    if (!table) return false;
    const std::vector<Asked> asked = asked_rows(indices, *table);
    if (asked.empty()) {
        call_kernel(op, traits, keys, stack);
        return true;
    }
    std::vector<std::int64_t> sizes = is_selection ? std::vector{indices.numel()} : indices.sizes().vec();
    sizes.push_back(weight.size(1));
    const at::Tensor result = at::empty(sizes, weight.options());
    RowCopy(*table, static_cast<std::byte*>(result.mutable_data_ptr())).copy(asked);
    table->engine->counters.fallback_calls.increment();
    torch::jit::drop(*stack, argument_count);
    torch::jit::push(*stack, result);
    return true;
}

bool try_sum_rows(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const c10::ArrayRef<c10::IValue> arguments = torch::jit::last(*stack, kBagArguments);
    const at::Tensor weight = arguments[0].toTensor();
    const at::Tensor indices = arguments[1].toTensor();
    if (arguments[kBagMode].toInt() == kBagMaximum) return false;
    const std::optional<Table> table = table_of(weight, indices, keys);
    if (!table) return false;
    const std::vector<Asked> asked = asked_rows(indices, *table);
    if (asked.empty()) {
        call_kernel(op, traits, keys, stack);
        return true;
    }
    std::vector<c10::IValue> changed = arguments.vec();
    const std::vector<Asked> distinct = distinct_rows(asked);
    const auto distinct_count = static_cast<std::int64_t>(distinct.size());
    // One more row than are asked for: padding that nobody asks for is to be a row, too.
    const at::Tensor rows = at::empty({distinct_count + 1, weight.size(1)}, weight.options());
    RowCopy(*table, static_cast<std::byte*>(rows.mutable_data_ptr())).copy(distinct);
    table->engine->counters.fallback_calls.increment();
    changed[0] = rows;
    changed[1] = places_among(distinct, asked).view(indices.sizes()).to(indices.scalar_type());
    const std::int64_t padding = changed[kBagPadding].toInt();
    if (padding >= 0) changed[kBagPadding] = place_among(distinct, static_cast<std::size_t>(padding));
    torch::jit::drop(*stack, kBagArguments);
    stack->insert(stack->end(), changed.begin(), changed.end());
    op.callBoxed(stack);
    return true;
}

}  // namespace torch_offload
