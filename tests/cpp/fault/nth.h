// Which Nth calls are tried. Header only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fault/case_runner.h"

namespace torch_offload::test {

/// Between the seeds of one sweep over N and of the next: were they the same ones, a training of few calls would end
/// all sweeps at its number.
inline constexpr std::uint64_t kSeedsOfASweep = 10'000;

/// Runs `run(number)` for numbers from 1: the first few, then further and further apart, until a case does not come to
/// its number or `usual` were run. MATRIX=full runs every number until one is not reached twice in a row: threads make
/// the count of calls differ.
template <typename Run>
void try_numbers(Run run, std::uint64_t usual) {
    constexpr std::uint64_t kAllOfFirst = 24;
    constexpr std::uint64_t kMost = 2000;
    const bool is_full = how_many(0, 1) == 1;
    std::uint64_t unreached = 0;
    std::uint64_t number = 1;
    for (std::uint64_t tried = 0; tried < (is_full ? kMost : usual) && unreached < 2; ++tried) {
        unreached = run(number) == Verdict::unreached ? unreached + 1 : 0;
        number += is_full ? 1 : std::max<std::uint64_t>(1, number / kAllOfFirst);
    }
}

}  // namespace torch_offload::test
