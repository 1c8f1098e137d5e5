// Frequencies of the symbols of RANS4. Layer codec: includes base only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/ternary.h"

namespace torch_offload {

inline constexpr std::size_t kSymbolCount = 81;
inline constexpr unsigned kFrequencyBits = 12;
inline constexpr std::uint32_t kFrequencyTotal = 1U << kFrequencyBits;

/// The symbol of each `quad_code`: the values as digits of base 3, the first lowest, with 2 for -1. Of codes that no
/// four values have: kSymbolCount.
std::uint32_t symbol_of(std::uint32_t code) noexcept;
std::uint32_t code_of(std::uint32_t symbol) noexcept;

/// How often each code occurs.
using CodeCounts = std::array<std::uint64_t, 256>;

/// Of each symbol, in kFrequencyTotal-ths; each less than the total, so that it fits 12 bits.
using SymbolFrequencies = std::array<std::uint16_t, kSymbolCount>;
bool is_valid(const SymbolFrequencies& frequencies) noexcept;
/// Every code that occurs gets at least 1; what the rounding leaves goes where it saves the most bits, found in
/// integers so that it is the same on every machine.
SymbolFrequencies frequencies_of(const CodeCounts& counts);

/// What decoding does with each slot: the code in bits 0-7, the symbol's frequency in 8-19, and the slot less the
/// symbol's first in 20-31.
using RansSlots = std::vector<std::uint32_t>;  // [kFrequencyTotal]
RansSlots slots_of(const SymbolFrequencies& frequencies);

/// From which a kernel for CUDA makes the slots of a class, which take fifty times the memory: of each symbol its slot
/// with number 0.
using RansSymbols = std::vector<std::uint32_t>;  // [kSymbolCount]
RansSymbols symbols_of(const SymbolFrequencies& frequencies);

/// What encoding does with each code: the frequency of its symbol in bits 0-11 (0 if it has none), the symbol's first
/// slot in 12-23.
using RansIntervals = std::vector<std::uint32_t>;  // [256]
RansIntervals intervals_of(const SymbolFrequencies& frequencies);

}  // namespace torch_offload
