// TUN12 as a lane decodes it: 256 columns of one row, which no other lane needs to know of, since the tables say where
// they begin. Layer codec: includes base only.
#pragma once

#include "codec/kernel_matrix.h"
#include "codec/warp.h"

namespace torch_offload {

inline constexpr std::uint32_t kSliceWords = kSliceColumns / kValuesOfWord;
/// Words before and behind a slice that a codeword may reach into.
inline constexpr std::uint32_t kGuardWords = kSkipUnit / kValuesOfWord;
inline constexpr std::uint32_t kRoomWords = kGuardWords + kSliceWords + kGuardWords;
/// 32-bit words of a tile that a lane brings at once: of most slices all.
inline constexpr std::uint32_t kSlotWords = 8;

/// The lower half of both words moved right. Pre: `by` is less than 32, here and below.
OFFLOAD_HOST_DEVICE inline std::uint32_t shifted_down(std::uint32_t low, std::uint32_t high, std::uint32_t by) {
#ifdef __CUDA_ARCH__
    return __funnelshift_r(low, high, by);
#else
    return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) >> by);
#endif
}
/// The upper half of both words moved left.
OFFLOAD_HOST_DEVICE inline std::uint32_t shifted_across(std::uint32_t low, std::uint32_t high, std::uint32_t by) {
#ifdef __CUDA_ARCH__
    return __funnelshift_l(low, high, by);
#else
    return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) >> (32 - by));
#endif
}

/// Puts values of a row together to words of QuadRows.
class SliceWriter {
public:
    /// `room`: kRoomWords words, `stride` apart, with those of the slice behind the first guard. The first `skipped`
    /// values, at most as many as the guard has, are not of the slice.
    OFFLOAD_DEVICE SliceWriter(std::uint32_t* room, std::uint32_t stride, std::uint32_t skipped) noexcept
        : room_(room),
          stride_(stride),
          fill_((kSkipUnit - skipped) % kValuesOfWord * 2),
          word_((kSkipUnit - skipped) / kValuesOfWord) {}

    /// `values`: two bits for each of up to 32, zero above.
    OFFLOAD_DEVICE void append(std::uint64_t values, std::uint32_t count) noexcept {
        const auto low = static_cast<std::uint32_t>(values);
        const auto high = static_cast<std::uint32_t>(values >> 32);
        const std::uint32_t first = partial_ | low << fill_;
        const std::uint32_t second = shifted_across(low, high, fill_);
        const std::uint32_t total = fill_ + 2 * count;
        if (total >= 32) room_[word_ * stride_] = first;
        if (total >= 64) room_[(word_ + 1) * stride_] = second;
        partial_ = total < 32 ? first : total < 64 ? second : shifted_across(high, 0, fill_);
        word_ += total / 32;
        fill_ = total % 32;
    }
    /// What is left of `columns` of the slice is zeros.
    OFFLOAD_DEVICE void finish(std::uint32_t columns) noexcept {
        room_[word_ * stride_] = partial_;
        while (++word_ < kGuardWords + kSliceWords) room_[word_ * stride_] = 0;
        if (columns == kSliceColumns) return;
        // What came behind the row's end, if its bytes have changed since they were checked.
        std::uint32_t word = kGuardWords + columns / kValuesOfWord;
        room_[word * stride_] &= (1U << 2 * (columns % kValuesOfWord)) - 1;
        while (++word < kGuardWords + kSliceWords) room_[word * stride_] = 0;
    }

private:
    std::uint32_t* room_;
    std::uint32_t stride_;
    std::uint32_t partial_ = 0;
    std::uint32_t fill_;  // bits of partial_
    std::uint32_t word_;  // that is being put together
};

/// Where a slice begins. Of rows that there are not, and those that other coders have: nowhere.
struct SliceStart {
    bool is_there = false;
    std::uint32_t word = 0;     // of the extent
    std::uint32_t nibble = 0;   // from there
    std::uint32_t skipped = 0;  // columns of the first codeword that are before the slice

    /// Pre: the pair that the slice is of is there.
    OFFLOAD_DEVICE static SliceStart of(const KernelMatrix& matrix, std::uint32_t row, std::uint32_t slice) noexcept {
        const std::uint32_t own = row < matrix.rows ? row : matrix.rows - 1;  // loads that wait for no branch
        const std::size_t at = std::size_t{slice / 2} * matrix.rows + own;
        const std::uint32_t first = matrix.row_words[own];
        const std::uint32_t begin = matrix.slice_starts[at];
        const std::uint32_t more = matrix.second_starts[at];
        const bool is_second = slice % 2 == 1;
        const std::uint32_t nibbles = begin / kSkipUnit + (is_second ? more / kSkipUnit * kNibblesOfCodeword : 0);
        SliceStart start;
        start.is_there = row < matrix.rows && first != kNoRow;
        start.word = start.is_there ? first + nibbles / kNibblesOfWord : 0;
        start.nibble = nibbles % kNibblesOfWord;
        start.skipped = (is_second ? more : begin) % kSkipUnit;
        return start;
    }
};

/// Codewords from the beginning of a slice on, some of them near at hand.
class CodewordReader {
public:
    /// Brings what lies there to slots[i * kWarpLanes], and what follows when it is asked for.
    OFFLOAD_DEVICE CodewordReader(const KernelMatrix& matrix, const SliceStart& start, std::uint32_t* slots) noexcept
        : pairs_(reinterpret_cast<const std::uint64_t*>(matrix.extent)),
          last_pair_(matrix.extent_words / 2 - 1),
          pair_(start.word / 2),
          slots_(slots),
          nibble_(start.word % 2 * kNibblesOfWord + start.nibble) {
        bring();
        take();
    }
    /// The codeword that comes next.
    OFFLOAD_DEVICE std::uint32_t codeword() const noexcept { return codeword_; }
    OFFLOAD_DEVICE void advance() noexcept {
        nibble_ += kNibblesOfCodeword;
        if (nibble_ >= (kSlotWords - 1) * kNibblesOfWord) {
            pair_ += nibble_ / (2 * kNibblesOfWord);
            nibble_ %= 2 * kNibblesOfWord;
            bring();
        }
        take();
    }

private:
    /// Inside the extent, whatever its bytes say.
    OFFLOAD_DEVICE void bring() noexcept {
        std::uint64_t pairs[kSlotWords / 2];
        OFFLOAD_UNROLL
        for (std::uint32_t i = 0; i < kSlotWords / 2; ++i) {
            pairs[i] = pairs_[pair_ + i < last_pair_ ? pair_ + i : last_pair_];
        }
        OFFLOAD_UNROLL
        for (std::uint32_t i = 0; i < kSlotWords / 2; ++i) {
            slots_[2 * i * kWarpLanes] = static_cast<std::uint32_t>(pairs[i]);
            slots_[(2 * i + 1) * kWarpLanes] = static_cast<std::uint32_t>(pairs[i] >> 32);
        }
    }
    OFFLOAD_DEVICE void take() noexcept {
        const std::uint32_t* const slot = slots_ + nibble_ / kNibblesOfWord * kWarpLanes;
        codeword_ = shifted_down(slot[0], slot[kWarpLanes], 4 * nibble_ % 32) & 4095;
    }

    const std::uint64_t* pairs_;  // of words of the extent
    std::uint32_t last_pair_;
    std::uint32_t pair_;  // that is in the first slots
    std::uint32_t* slots_;
    std::uint32_t nibble_;  // of the slots: where `codeword_` begins
    std::uint32_t codeword_ = 0;
};

/// A word of a class of TUN12, from wherever its table is.
struct TunWord {
    std::uint64_t first;
    std::uint64_t second;
    std::uint32_t count;

    /// kWide: words have another 64 bits.
    template <bool kWide>
    OFFLOAD_DEVICE static TunWord load(const std::uint64_t* table, std::uint32_t codeword) noexcept {
        const auto* const counts = reinterpret_cast<const std::uint8_t*>(table + (kWide ? 2 : 1) * kCodewordCount);
        return {table[codeword], kWide ? table[kCodewordCount + codeword] : 0, counts[codeword]};
    }
};

/// Appends the words that begin before `end_column`, all of which are of the class whose table this is. Returns the
/// column that the next one begins at.
template <bool kWide>
OFFLOAD_DEVICE std::uint32_t take_words(const std::uint64_t* table, std::uint32_t column, std::uint32_t end_column,
                                        CodewordReader& reader, SliceWriter& writer) {
    if (column >= end_column) return column;
    TunWord word = TunWord::load<kWide>(table, reader.codeword());
    while (column < end_column) {
        reader.advance();
        const TunWord next = TunWord::load<kWide>(table, reader.codeword());
        if (word.count == kRestCount) return ~0U;  // the rest of the row is zero
        if (kWide && word.count > kValuesOfFirst) {
            writer.append(word.first, kValuesOfFirst);
            writer.append(word.second, word.count - kValuesOfFirst);
        } else {
            writer.append(word.first, word.count);
        }
        column += word.count;
        word = next;
    }
    return column;
}

/// The words of class `index`, wherever `table` has them.
OFFLOAD_DEVICE inline std::uint32_t take_class(const KernelMatrix& matrix, std::uint32_t index,
                                               const std::uint64_t* table, std::uint32_t column,
                                               std::uint32_t end_column, CodewordReader& reader, SliceWriter& writer) {
    const KernelClass& one = matrix.classes[index];
    const std::uint32_t end = one.end_column < end_column ? one.end_column : end_column;
    return one.is_wide ? take_words<true>(table, column, end, reader, writer)
                       : take_words<false>(table, column, end, reader, writer);
}

}  // namespace torch_offload
