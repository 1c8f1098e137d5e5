#include "codec/rans_model.h"

#include <algorithm>
#include <numeric>

namespace torch_offload {
namespace {

/// Bits saved by one more for a symbol of this count and frequency, as a fraction: count / (frequency + 1/2).
struct Gain {
    std::uint64_t count;
    std::uint32_t frequency;
    friend bool operator<(const Gain& left, const Gain& right) noexcept {
        using Wide = unsigned __int128;
        return Wide{left.count} * (2 * right.frequency + 1) < Wide{right.count} * (2 * left.frequency + 1);
    }
};

std::size_t best_to_raise(const std::array<std::uint64_t, kSymbolCount>& counts, const SymbolFrequencies& frequencies) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < kSymbolCount; ++i) {
        if (Gain{counts[best], frequencies[best]} < Gain{counts[i], frequencies[i]}) best = i;
    }
    return best;
}

std::size_t best_to_lower(const std::array<std::uint64_t, kSymbolCount>& counts, const SymbolFrequencies& frequencies) {
    std::size_t best = kSymbolCount;
    for (std::size_t i = 0; i < kSymbolCount; ++i) {
        if (frequencies[i] < 2) continue;
        const auto loss = [&](std::size_t of) { return Gain{counts[of], frequencies[of] - 1U}; };
        if (best == kSymbolCount || loss(i) < loss(best)) best = i;
    }
    return best;
}

}  // namespace

std::uint32_t symbol_of(std::uint32_t code) noexcept {
    std::uint32_t symbol = 0;
    for (std::uint32_t i = kQuad; i-- > 0;) {
        const std::uint32_t two = code >> (2 * i) & 3;
        if (two == 2) return kSymbolCount;
        symbol = symbol * 3 + (two == 3 ? 2 : two);
    }
    return symbol;
}

std::uint32_t code_of(std::uint32_t symbol) noexcept {
    std::uint32_t code = 0;
    for (std::uint32_t i = 0; i < kQuad; ++i, symbol /= 3) code |= (symbol % 3 == 2 ? 3 : symbol % 3) << (2 * i);
    return code;
}

bool is_valid(const SymbolFrequencies& frequencies) noexcept {
    const auto total = std::accumulate(frequencies.begin(), frequencies.end(), std::uint32_t{0});
    return total == kFrequencyTotal && *std::max_element(frequencies.begin(), frequencies.end()) < kFrequencyTotal;
}

SymbolFrequencies frequencies_of(const CodeCounts& code_counts) {
    std::array<std::uint64_t, kSymbolCount> counts{};
    for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) counts[symbol] = code_counts[code_of(symbol)];
    const std::uint64_t total =
        std::max<std::uint64_t>(1, std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
    SymbolFrequencies frequencies{};
    std::uint32_t given = 0;
    for (std::size_t i = 0; i < kSymbolCount; ++i) {
        const auto share =
            static_cast<std::uint64_t>(static_cast<unsigned __int128>(counts[i]) * kFrequencyTotal / total);
        frequencies[i] = static_cast<std::uint16_t>(std::max<std::uint64_t>(counts[i] > 0 ? 1 : 0, share));
        given += frequencies[i];
    }
    for (; given < kFrequencyTotal; ++given) ++frequencies[best_to_raise(counts, frequencies)];
    for (; given > kFrequencyTotal; --given) --frequencies[best_to_lower(counts, frequencies)];
    const auto sole = std::find(frequencies.begin(), frequencies.end(), kFrequencyTotal);
    if (sole != frequencies.end()) {
        --*sole;
        ++frequencies[sole == frequencies.begin() ? 1 : 0];
    }
    return frequencies;
}

RansSlots slots_of(const SymbolFrequencies& frequencies) {
    RansSlots slots(kFrequencyTotal);
    std::uint32_t* next = slots.data();
    for (const std::uint32_t first : symbols_of(frequencies)) {
        for (std::uint32_t i = 0; i < first >> 8; ++i) *next++ = first | i << 20;
    }
    return slots;
}

RansSymbols symbols_of(const SymbolFrequencies& frequencies) {
    RansSymbols symbols(kSymbolCount);
    for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
        symbols[symbol] = code_of(symbol) | std::uint32_t{frequencies[symbol]} << 8;
    }
    return symbols;
}

RansIntervals intervals_of(const SymbolFrequencies& frequencies) {
    RansIntervals intervals(256);
    std::uint32_t first = 0;
    for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
        intervals[code_of(symbol)] = frequencies[symbol] | first << kFrequencyBits;
        first += frequencies[symbol];
    }
    return intervals;
}

}  // namespace torch_offload
