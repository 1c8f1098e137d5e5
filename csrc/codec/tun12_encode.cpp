#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "codec/tun12.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaskColumns = 64;

/// One bit per column from `column` on: whether its value is not zero. The values' lowest bits say it.
std::uint64_t nonzero_mask(const std::int8_t* row, std::size_t column, std::size_t columns) noexcept {
    std::uint64_t eights[kMaskColumns / 8] = {};
    std::memcpy(eights, row + column, std::min(columns - column, kMaskColumns));
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < std::size(eights); ++i) {
        const std::uint64_t lowest = eights[i] & 0x0101010101010101;
        mask |= (lowest * 0x0102040810204080 >> 56) << (8 * i);  // gathers one bit of each byte
    }
    return mask;
}

/// A row on its way through the trees, from one value that is not zero to the next.
class RowWalk {
public:
    /// Pre: `to` [columns + 2].
    RowWalk(const ColumnClasses& classes, std::size_t column_count, const Tun12Steps& steps, std::uint16_t* to) noexcept
        : classes_(classes),
          column_count_(column_count),
          roots_(steps.roots.data()),
          zeros_left_(steps.zeros_left.data()),
          zero_codeword_(steps.zero_codeword.data()),
          by_value_(steps.by_value.data()),
          next_codeword_(to),
          node_(roots_[0]),
          root_(roots_[0]),
          class_end_(end_column(classes, 0, column_count)) {}

    /// Zeros up to `position`, then a value there. Which value ends a word cannot be predicted, so no branch asks.
    void take(std::size_t position, std::int8_t value) noexcept {
        take_zeros(position - column_);
        const std::uint32_t step = by_value_[2 * node_ + (value < 0 ? 1 : 0)];
        column_ = position + 1;
        *next_codeword_ = static_cast<std::uint16_t>(step >> 16 & 4095);
        const std::uint32_t ends_word = step >> 31;
        next_codeword_ += ends_word;
        if (column_ >= class_end_) [[unlikely]]
            begin_next_class();
        node_ = ends_word ? root_ : step & 0xFFFF;
    }
    /// What is zero up to the row's end: of a word that has begun until it ends, then the rest. Returns where the next
    /// codeword would go.
    std::uint16_t* finish() noexcept {
        if (node_ != root_) end_word_by_zeros();
        if (column_ < column_count_) *next_codeword_++ = kRestCodeword;
        return next_codeword_;
    }

private:
    void take_zeros(std::size_t count) noexcept {
        while (count >= zeros_left_[node_]) {
            count -= zeros_left_[node_];
            end_word_by_zeros();
        }
        node_ += static_cast<std::uint32_t>(count);
    }
    void end_word_by_zeros() noexcept {
        *next_codeword_++ = zero_codeword_[node_];
        column_ += zeros_left_[node_];
        if (column_ >= class_end_) [[unlikely]]
            begin_next_class();
        node_ = root_;
    }
    /// From here on words begin at the root of the class that has this column. Columns only grow.
    void begin_next_class() noexcept {
        while (class_ + 1 < classes_.size() && classes_[class_ + 1].first_column <= column_) ++class_;
        root_ = roots_[class_];
        class_end_ = end_column(classes_, class_, column_count_);
    }

    const ColumnClasses& classes_;
    std::size_t column_count_;
    const std::uint32_t* roots_;
    const std::uint8_t* zeros_left_;
    const std::uint16_t* zero_codeword_;
    const std::uint32_t* by_value_;
    std::uint16_t* next_codeword_;
    std::uint32_t node_;
    std::uint32_t root_;
    std::size_t class_end_;
    std::size_t column_ = 0;
    std::size_t class_ = 0;
};

/// Codewords of a row, which `walk` is at the beginning of. Returns their end.
std::uint16_t* encode_row(RowWalk walk, const std::int8_t* row, std::size_t columns) noexcept {
    for (std::size_t column = 0; column < columns; column += kMaskColumns) {
        for (std::uint64_t mask = nonzero_mask(row, column, columns); mask != 0; mask &= mask - 1) {
            const std::size_t position = column + static_cast<std::size_t>(std::countr_zero(mask));
            walk.take(position, row[position]);
        }
    }
    return walk.finish();
}

/// Two codewords in three bytes, the first lowest; an odd one at the end in two.
std::vector<std::byte> packed(const std::vector<std::uint16_t>& codewords) {
    std::vector<std::byte> bytes((codewords.size() * kCodewordBits + 7) / 8);
    for (std::size_t i = 0; i < codewords.size(); ++i) {
        const std::uint32_t shifted = std::uint32_t{codewords[i]} << (i % 2 * 4);
        bytes[i * 3 / 2] |= static_cast<std::byte>(shifted & 0xFF);
        bytes[i * 3 / 2 + 1] |= static_cast<std::byte>(shifted >> 8);
    }
    return bytes;
}

/// Numbers for the inner nodes from `first` on, such that the child for a zero follows its parent.
std::vector<std::uint32_t> numbers_along_zeros(const TunstallTree& tree, std::uint32_t first) {
    constexpr std::uint32_t kNone = UINT32_MAX;
    std::vector<std::uint32_t> numbers(tree.nodes.size(), kNone);
    for (std::size_t i = 0; i < tree.nodes.size(); ++i) {
        for (std::size_t node = i; !tree.nodes[node].is_leaf() && numbers[node] == kNone;) {
            numbers[node] = first++;
            node = tree.nodes[node].children[0];
        }
    }
    return numbers;
}

}  // namespace

void Tun12Steps::add(const TunstallTree& tree) {
    const auto first = static_cast<std::uint32_t>(zeros_left.size());
    roots.push_back(first);
    const std::vector<std::uint32_t> numbers = numbers_along_zeros(tree, first);
    const std::size_t inner_count = tree.nodes.size() / 3;
    zeros_left.resize(first + inner_count);
    zero_codeword.resize(first + inner_count);
    by_value.resize(2 * (first + inner_count));
    for (std::size_t i = tree.nodes.size(); i-- > 0;) {  // children have higher numbers than their parents
        const TunstallTree::Node& node = tree.nodes[i];
        if (node.is_leaf()) continue;
        const TunstallTree::Node& zero = tree.nodes[node.children[0]];
        const std::uint32_t number = numbers[i];
        zeros_left[number] = zero.is_leaf() ? 1 : static_cast<std::uint8_t>(zeros_left[number + 1] + 1);
        zero_codeword[number] = zero.is_leaf() ? zero.codeword : zero_codeword[number + 1];
        for (std::size_t value = 1; value < 3; ++value) {
            const TunstallTree::Node& child = tree.nodes[node.children[value]];
            by_value[2 * number + value - 1] =
                child.is_leaf() ? 1U << 31 | std::uint32_t{child.codeword} << 16 : numbers[node.children[value]];
        }
    }
}

Tun12Encoder::Tun12Encoder(std::size_t columns, ColumnClasses classes, const std::vector<TunstallClass>& coded)
    : column_count_(columns), classes_(std::move(classes)) {
    for (const TunstallClass& one : coded) steps_.add(TunstallTree(one.odds, one.limit));
}

std::vector<std::byte> Tun12Encoder::encode(const TernaryView& tile, InstructionSet) const {
    std::vector<std::uint16_t> codewords;
    std::vector<std::uint16_t> of_row(tile.columns + 2);
    for (std::size_t i = 0; i < tile.rows; ++i) {
        const RowWalk walk(classes_, column_count_, steps_, of_row.data());
        const std::uint16_t* const end = encode_row(walk, tile.row(i), column_count_);
        codewords.insert(codewords.end(), std::as_const(of_row).data(), end);
    }
    return packed(codewords);
}

}  // namespace torch_offload
