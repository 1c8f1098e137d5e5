// The loop that decodes a row of TUN12, compiled once per instruction set: internal linkage, no standard headers.
// Layer codec: includes base only.
#pragma once

#include "codec/tun12.h"

namespace torch_offload {
namespace {

/// A word in one register where the instruction set has one that wide; GCC copies memory in smaller ones.
template <std::size_t kWordBytes>
struct Word {
    typedef std::int8_t Register __attribute__((vector_size(kWordBytes), aligned(1), may_alias));
};

template <std::size_t kWordBytes>
inline void copy_word(std::int8_t* to, const std::int8_t* from) noexcept {
    using Register = typename Word<kWordBytes>::Register;
    *reinterpret_cast<Register*>(to) = *reinterpret_cast<const Register*>(from);
}

/// Where decoding stands in a row; the rest of the row behind `column` is zero if `is_rest`.
struct Tun12Position {
    std::size_t column;
    std::size_t next;
    bool is_rest;
};

inline std::uint64_t codewords_from(const std::byte* bytes, std::size_t index) noexcept {
    std::uint64_t window;
    __builtin_memcpy(&window, bytes + index * 3 / 2, sizeof(window));
    return window >> (index % 2 * 4);
}

/// The word of the codeword in bits [first, first + 12) of a window.
template <std::size_t kWordBytes, unsigned kFirstBit>
inline const std::int8_t* word_in(std::uint64_t window, const std::int8_t* words) noexcept {
    return words + (window >> kFirstBit & 4095) * kWordBytes;
}

template <std::size_t kWordBytes>
inline std::size_t length_of(const std::int8_t* word) noexcept {
    return static_cast<std::uint8_t>(word[kWordBytes - 1]);
}

/// Decodes codewords that begin before `end`. Words are copied whole; what is too much lies in front of the next word
/// or behind the row. Four at a time while they end before `end` and none of them is the rest.
template <std::size_t kWordBytes>
inline Tun12Position decode_class(const TunstallWords& class_words, const std::byte* bytes, std::size_t codeword_count,
                                  std::size_t end, Tun12Position at, std::int8_t* row) noexcept {
    const std::int8_t* const words = class_words.words();
    while (at.next + 4 <= codeword_count) {
        const std::uint64_t window = codewords_from(bytes, at.next);
        const std::int8_t* const first = word_in<kWordBytes, 0>(window, words);
        const std::int8_t* const second = word_in<kWordBytes, 12>(window, words);
        const std::int8_t* const third = word_in<kWordBytes, 24>(window, words);
        const std::int8_t* const fourth = word_in<kWordBytes, 36>(window, words);
        const std::size_t at_second = at.column + length_of<kWordBytes>(first);
        const std::size_t at_third = at_second + length_of<kWordBytes>(second);
        const std::size_t at_fourth = at_third + length_of<kWordBytes>(third);
        const std::size_t after = at_fourth + length_of<kWordBytes>(fourth);
        if (after > end || after - at.column >= TunstallWords::kRestLength) break;
        copy_word<kWordBytes>(row + at.column, first);
        copy_word<kWordBytes>(row + at_second, second);
        copy_word<kWordBytes>(row + at_third, third);
        copy_word<kWordBytes>(row + at_fourth, fourth);
        at = {after, at.next + 4, false};
    }
    while (at.column < end && at.next < codeword_count && !at.is_rest) {
        const std::int8_t* const word = word_in<kWordBytes, 0>(codewords_from(bytes, at.next), words);
        copy_word<kWordBytes>(row + at.column, word);
        const std::size_t length = length_of<kWordBytes>(word);
        at.is_rest = length == TunstallWords::kRestLength;
        at = {at.column + (at.is_rest ? 0 : length), at.next + 1, at.is_rest};
    }
    return at;
}

bool decode_row(const TunstallColumns& columns, Tun12Stream& stream, std::int8_t* row) noexcept {
    Tun12Position at{0, stream.next, false};
    for (std::size_t i = 0; i < columns.classes.size() && !at.is_rest; ++i) {
        const std::size_t end =
            i + 1 < columns.classes.size() ? columns.classes[i + 1].first_column : columns.column_count;
        if (at.column >= end) continue;
        const TunstallWords& words = *columns.words[i];
        at = words.word_bytes() == 32 ? decode_class<32>(words, stream.bytes, stream.codeword_count, end, at, row)
                                      : decode_class<64>(words, stream.bytes, stream.codeword_count, end, at, row);
        if (at.column < end && !at.is_rest) return false;
    }
    stream.next = at.next;
    const std::size_t known = at.is_rest ? at.column : columns.column_count;
    __builtin_memset(row + known, 0, (columns.column_count + 63) / 64 * 64 - known);
    return true;
}

}  // namespace
}  // namespace torch_offload
