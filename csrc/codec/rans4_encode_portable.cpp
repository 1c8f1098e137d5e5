// Coding of RANS4 for any processor.
#include <algorithm>

#include "codec/little_endian.h"
#include "codec/rans4_block.h"

namespace torch_offload {

bool rans4_encode_portable(const RansColumns<RansIntervals>& columns, RansGrowth& growth,
                           const TernaryView& rows) noexcept {
    RansGrowth now = growth;
    bool has_frequencies = true;
    for_quads_backwards(columns, rows, [&](const RansRows& block, const QuadTables& tables) {
        for (std::size_t i = tables.count; i-- > 0;) {
            const std::uint32_t* const intervals = tables.intervals[i];
            for (std::size_t lane = kRansLanes - rows.rows; lane < kRansLanes; ++lane) {
                const auto* const four = reinterpret_cast<const std::byte*>(block.at(lane) + i * kQuad);
                const std::uint32_t interval = intervals[quad_code(load_number<std::uint32_t>(four))];
                const std::uint32_t frequency = interval % kFrequencyTotal;
                has_frequencies &= frequency > 0;
                std::uint32_t state = now.states[lane];
                const std::uint32_t gives = state >= frequency << 20 ? 1 : 0;
                *now.word = static_cast<std::uint16_t>(state);
                now.word += gives;
                state >>= 16 * gives;
                const std::uint32_t quotient = state / std::max(frequency, 1U);
                now.states[lane] = state + quotient * (kFrequencyTotal - frequency) + (interval >> kFrequencyBits);
            }
        }
    });
    growth = now;
    return has_frequencies;
}

}  // namespace torch_offload
