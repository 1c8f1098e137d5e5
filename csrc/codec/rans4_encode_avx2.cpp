// Coding of RANS4 for processors with AVX2: eight lanes in a register. Only what stands below the pragma may use its
// instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/rans4.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,popcnt")
#endif

#include "codec/rans4_block.h"

namespace torch_offload {
namespace {

constexpr std::size_t kWidth = 8;
constexpr std::size_t kVectors = kRansLanes / kWidth;

/// For each set of lanes that give a word away: which of them is the first, the second, ...
struct GiverOrder {
    alignas(32) std::uint32_t index[256][kWidth];
};
constexpr GiverOrder kGiverOrder = [] {
    GiverOrder order{};
    for (std::uint32_t lanes = 0; lanes < 256; ++lanes) {
        std::uint32_t count = 0;
        for (std::uint32_t lane = 0; lane < kWidth; ++lane) {
            if (lanes >> lane & 1) order.index[lanes][count++] = lane;
        }
    }
    return order;
}();

struct Lanes {
    __m256i states[kVectors];
    __m256i active[kVectors];  // all bits, or none
    std::uint16_t* word;
    __m256i missing;  // lanes that had a symbol without a frequency
};

/// The codes of four quads, each in eight lanes, from 16 columns of eight rows.
inline void load_codes(const RansRows& rows, std::size_t first_lane, __m256i (&codes)[kQuadsAtOnce]) noexcept {
    __m256i parts[4];  // part p of number i belongs to lane 4 p + i
    for (std::size_t i = 0; i < 4; ++i) {
        const auto* const low = reinterpret_cast<const __m128i*>(rows.at(first_lane + i));
        const auto* const high = reinterpret_cast<const __m128i*>(rows.at(first_lane + i + 4));
        const __m256i bytes = _mm256_and_si256(_mm256_loadu2_m128i(high, low), _mm256_set1_epi8(3));
        const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0401));
        parts[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
    }
    const __m256i low01 = _mm256_unpacklo_epi32(parts[0], parts[1]);
    const __m256i high01 = _mm256_unpackhi_epi32(parts[0], parts[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(parts[2], parts[3]);
    const __m256i high23 = _mm256_unpackhi_epi32(parts[2], parts[3]);
    codes[0] = _mm256_unpacklo_epi64(low01, low23);
    codes[1] = _mm256_unpackhi_epi64(low01, low23);
    codes[2] = _mm256_unpacklo_epi64(high01, high23);
    codes[3] = _mm256_unpackhi_epi64(high01, high23);
}

/// Numbers below 2^32 to the nearest floats.
inline __m256 floats_of(__m256i numbers) noexcept {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(numbers, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(numbers, _mm256_set1_epi32(0xFFFF)));
    return _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536)), low);
}

inline __m256i is_at_least(__m256i left, __m256i right) noexcept {
    return _mm256_cmpeq_epi32(_mm256_max_epu32(left, right), left);
}

/// The low halves of those states that are given away, in order of their lanes.
inline void store_words(Lanes& lanes, __m256i state, unsigned gives) noexcept {
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kGiverOrder.index[gives]));
    const __m256i low = _mm256_and_si256(_mm256_permutevar8x32_epi32(state, order), _mm256_set1_epi32(0xFFFF));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes.word), _mm256_castsi256_si128(words));
    lanes.word += __builtin_popcount(gives);
}

/// One symbol of eight lanes. Lanes whose state would become too large give a word away first.
inline void encode_symbol(Lanes& lanes, std::size_t vector, __m256i codes, const std::uint32_t* intervals) noexcept {
    const __m256i interval = _mm256_i32gather_epi32(reinterpret_cast<const int*>(intervals), codes, 4);
    const __m256i frequency = _mm256_and_si256(interval, _mm256_set1_epi32(kFrequencyTotal - 1));
    const __m256i complement = _mm256_sub_epi32(_mm256_set1_epi32(kFrequencyTotal), frequency);
    const __m256i active = lanes.active[vector];
    const __m256i state = lanes.states[vector];
    const __m256i has_none = _mm256_cmpeq_epi32(frequency, _mm256_setzero_si256());
    lanes.missing = _mm256_or_si256(lanes.missing, _mm256_and_si256(active, has_none));
    const __m256i gives = _mm256_and_si256(active, is_at_least(state, _mm256_slli_epi32(frequency, 20)));
    store_words(lanes, state, static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(gives))));
    const __m256i kept = _mm256_blendv_epi8(state, _mm256_srli_epi32(state, 16), gives);
    // The quotient or one less, see kLessThanOne; what is left over tells.
    const __m256 dividend = _mm256_mul_ps(floats_of(kept), _mm256_set1_ps(kLessThanOne));
    const __m256i quotient = _mm256_cvttps_epi32(_mm256_div_ps(dividend, _mm256_cvtepi32_ps(frequency)));
    const __m256i remainder = _mm256_sub_epi32(kept, _mm256_mullo_epi32(quotient, frequency));
    const __m256i grown = _mm256_add_epi32(_mm256_add_epi32(kept, _mm256_srli_epi32(interval, kFrequencyBits)),
                                           _mm256_mullo_epi32(quotient, complement));
    const __m256i rest = _mm256_and_si256(is_at_least(remainder, frequency), complement);
    lanes.states[vector] = _mm256_blendv_epi8(state, _mm256_add_epi32(grown, rest), active);
}

}  // namespace

bool rans4_encode_avx2(const RansColumns<RansIntervals>& columns, RansGrowth& growth,
                       const TernaryView& rows) noexcept {
    Lanes lanes;
    lanes.word = growth.word;
    lanes.missing = _mm256_setzero_si256();
    const int unused = static_cast<int>(kRansLanes - rows.rows);  // the first ones
    for (std::size_t v = 0; v < kVectors; ++v) {
        const int first = static_cast<int>(v * kWidth);
        const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        lanes.active[v] = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(unused - 1));
        lanes.states[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(growth.states + first));
    }
    for_quads_backwards(columns, rows, [&](const RansRows& block, const QuadTables& tables) {
        __m256i codes[kVectors][kQuadsAtOnce];
        for (std::size_t v = 0; v < kVectors; ++v) load_codes(block, v * kWidth, codes[v]);
        for (std::size_t i = tables.count; i-- > 0;) {
            for (std::size_t v = 0; v < kVectors; ++v) encode_symbol(lanes, v, codes[v][i], tables.intervals[i]);
        }
    });
    for (std::size_t v = 0; v < kVectors; ++v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(growth.states + v * kWidth), lanes.states[v]);
    }
    growth.word = lanes.word;
    return _mm256_testz_si256(lanes.missing, lanes.missing) != 0;
}

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

bool rans4_encode_avx2(const RansColumns<RansIntervals>& columns, RansGrowth& growth,
                       const TernaryView& rows) noexcept {
    return rans4_encode_portable(columns, growth, rows);
}

}  // namespace torch_offload

#endif
