#include "codec/class_counter.h"

#include <algorithm>
#include <cstring>

namespace torch_offload {
namespace {

constexpr std::uint64_t kLowest = 0x0101010101010101;

std::uint64_t load(const std::int8_t* values, std::size_t count) noexcept {
    std::uint64_t eight = 0;
    std::memcpy(&eight, values, count);
    return eight;
}

std::uint64_t sum_of_bytes(std::uint64_t bytes) noexcept { return bytes * kLowest >> 56; }

/// The codes of two quads, in bits 0-7 and 32-39.
std::uint64_t two_codes(std::uint64_t eight) noexcept {
    const std::uint64_t pairs = (eight & 0x0303030303030303) | (eight & 0x0303030303030303) >> 6;
    return ((pairs & 0x000F000F000F000F) | (pairs & 0x000F000F000F000F) >> 12) & 0x000000FF000000FF;
}

/// Bits 1 to 7 of -1, 0 and +1 are equal, and bit 0 is set where they are.
bool are_ternary(std::uint64_t eight) noexcept {
    return ((eight ^ eight >> 1) & 0x7E7E7E7E7E7E7E7E) == 0 && (eight >> 7 & ~eight & kLowest) == 0;
}

/// The inner loop is one that compilers make a vector of.
bool are_ternary(const std::int8_t* values, std::size_t count) noexcept {
    constexpr std::size_t kWidth = 16;
    std::uint8_t beyond[kWidth] = {};
    std::size_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        for (std::size_t k = 0; k < kWidth; ++k) beyond[k] |= static_cast<std::uint8_t>(values[i + k] + 1) > 2 ? 1 : 0;
    }
    for (; i < count; ++i) beyond[0] |= static_cast<std::uint8_t>(values[i] + 1) > 2 ? 1 : 0;
    return std::all_of(beyond, beyond + kWidth, [](std::uint8_t each) { return each == 0; });
}

/// Of eight values at once, by byte.
struct Eights {
    static constexpr std::size_t kMaxCount = 31;  // so that the sum of all bytes fits one
    std::uint64_t nonzeros = 0;
    std::uint64_t minuses = 0;
    bool all_ternary = true;

    void add(std::uint64_t eight) noexcept {
        nonzeros += eight & kLowest;
        minuses += eight >> 7 & kLowest;
        all_ternary &= are_ternary(eight);
    }
};

/// Values of quads with this code.
TernaryCounts values_of(std::uint32_t code, std::uint64_t count) noexcept {
    TernaryCounts values{.total = kQuad * count};
    for (std::size_t i = 0; i < kQuad; ++i) {
        values.zeros += (code >> (2 * i) & 3) == 0 ? count : 0;
        values.pluses += (code >> (2 * i) & 3) == 1 ? count : 0;
    }
    return values;
}

void add(const TernaryCounts& counts, TernaryCounts& sum) noexcept {
    sum.zeros += counts.zeros;
    sum.pluses += counts.pluses;
    sum.total += counts.total;
}

}  // namespace

void ClassCounter::add_values(const std::int8_t* row, std::size_t begin, std::size_t end) noexcept {
    for (std::size_t column = begin; column < end;) {
        Eights eights;
        const std::size_t first = column;
        const std::size_t stop = std::min(end, column + 8 * Eights::kMaxCount);
        for (; column + 8 <= stop; column += 8) eights.add(load(row + column, 8));
        if (column < stop) eights.add(load(row + column, stop - column));
        column = stop;
        const std::uint64_t nonzeros = sum_of_bytes(eights.nonzeros);
        add({stop - first - nonzeros, nonzeros - sum_of_bytes(eights.minuses), stop - first}, values_);
        is_ternary_ &= eights.all_ternary;
    }
}

void ClassCounter::add_quads(const std::int8_t* row, std::size_t begin, std::size_t end, std::size_t columns) noexcept {
    const std::size_t first = std::min(end, (begin + kQuad - 1) / kQuad * kQuad);
    const std::size_t quads = (end - first) / kQuad;
    const std::size_t last = first + quads * kQuad;
    add_values(row, begin, first);
    add_whole_quads(row + first, quads);
    add_values(row, last, end);
    if (last < end) ++last_quads_[quad_at(row, last, columns)];
}

void ClassCounter::add_whole_quads(const std::int8_t* values, std::size_t quads) noexcept {
    is_ternary_ &= are_ternary(values, quads * kQuad);
    std::size_t quad = 0;
    for (; quad + kParts <= quads; quad += kParts) {
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kParts; i += 2) {
            const std::uint64_t codes = two_codes(load(values + (quad + i) * kQuad, 8));
            ++quads_[i][codes & 0xFF];
            ++quads_[i + 1][codes >> 32];
        }
    }
    for (; quad < quads; ++quad) ++quads_[0][quad_at(values, quad * kQuad, quads * kQuad)];
}

void ClassCounter::add_to(ClassCounts& sum) const noexcept {
    for (std::uint32_t code = 0; code < 256; ++code) {
        std::uint64_t whole = 0;
        for (const auto& part : quads_) whole += part[code];
        sum.quads[code] += whole + last_quads_[code];
        add(values_of(code, whole), sum.values);
    }
    add(values_, sum.values);
    sum.is_ternary = sum.is_ternary && is_ternary_;
}

}  // namespace torch_offload
