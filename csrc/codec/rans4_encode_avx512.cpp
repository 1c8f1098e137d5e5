// Coding of RANS4 for processors with AVX-512: sixteen lanes in a register. Only what stands below the pragma may use
// its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/rans4.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,popcnt,prefer-vector-width=512")
#endif

#include "codec/rans4_block.h"

namespace torch_offload {
namespace {

constexpr std::size_t kWidth = 16;
constexpr std::size_t kVectors = kRansLanes / kWidth;

struct Lanes {
    __m512i states[kVectors];
    __mmask16 active[kVectors];
    std::uint16_t* word;
    __mmask16 missing;  // lanes that had a symbol without a frequency
};

/// The codes of four quads, each in sixteen lanes, from 16 columns of sixteen rows.
inline void load_codes(const RansRows& rows, std::size_t first_lane, __m512i (&codes)[kQuadsAtOnce]) noexcept {
    __m512i parts[4];  // part p of number i belongs to lane 4 p + i
    for (std::size_t i = 0; i < 4; ++i) {
        const auto row = [&](std::size_t p) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at(first_lane + 4 * p + i)));
        };
        __m512i bytes = _mm512_castsi128_si512(row(0));
        bytes = _mm512_inserti32x4(bytes, row(1), 1);
        bytes = _mm512_inserti32x4(bytes, row(2), 2);
        bytes = _mm512_inserti32x4(bytes, row(3), 3);
        bytes = _mm512_and_si512(bytes, _mm512_set1_epi8(3));
        const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x0401));
        parts[i] = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    }
    const __m512i low01 = _mm512_unpacklo_epi32(parts[0], parts[1]);
    const __m512i high01 = _mm512_unpackhi_epi32(parts[0], parts[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(parts[2], parts[3]);
    const __m512i high23 = _mm512_unpackhi_epi32(parts[2], parts[3]);
    codes[0] = _mm512_unpacklo_epi64(low01, low23);
    codes[1] = _mm512_unpackhi_epi64(low01, low23);
    codes[2] = _mm512_unpacklo_epi64(high01, high23);
    codes[3] = _mm512_unpackhi_epi64(high01, high23);
}

/// One symbol of sixteen lanes. Lanes whose state would become too large give a word away first.
inline void encode_symbol(Lanes& lanes, std::size_t vector, __m512i codes, const std::uint32_t* intervals) noexcept {
    const __m512i interval = _mm512_i32gather_epi32(codes, intervals, 4);
    const __m512i frequency = _mm512_and_si512(interval, _mm512_set1_epi32(kFrequencyTotal - 1));
    const __m512i complement = _mm512_sub_epi32(_mm512_set1_epi32(kFrequencyTotal), frequency);
    const __mmask16 active = lanes.active[vector];
    const __m512i state = lanes.states[vector];
    lanes.missing |= _mm512_mask_testn_epi32_mask(active, frequency, frequency);
    const __mmask16 gives = _mm512_mask_cmpge_epu32_mask(active, state, _mm512_slli_epi32(frequency, 20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.word),
                        _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(gives, state)));
    lanes.word += __builtin_popcount(gives);
    const __m512i kept = _mm512_mask_srli_epi32(state, gives, state, 16);
    // The quotient or one less, see kLessThanOne; what is left over tells.
    const __m512 dividend = _mm512_mul_ps(_mm512_cvtepu32_ps(kept), _mm512_set1_ps(kLessThanOne));
    const __m512i quotient = _mm512_cvttps_epi32(_mm512_div_ps(dividend, _mm512_cvtepi32_ps(frequency)));
    const __m512i remainder = _mm512_sub_epi32(kept, _mm512_mullo_epi32(quotient, frequency));
    const __m512i grown = _mm512_add_epi32(_mm512_add_epi32(kept, _mm512_srli_epi32(interval, kFrequencyBits)),
                                           _mm512_mullo_epi32(quotient, complement));
    const __mmask16 is_one_less = _mm512_cmpge_epu32_mask(remainder, frequency);
    lanes.states[vector] =
        _mm512_mask_mov_epi32(state, active, _mm512_mask_add_epi32(grown, is_one_less, grown, complement));
}

}  // namespace

bool rans4_encode_avx512(const RansColumns<RansIntervals>& columns, RansGrowth& growth,
                         const TernaryView& rows) noexcept {
    Lanes lanes;
    lanes.word = growth.word;
    lanes.missing = 0;
    const std::size_t unused = kRansLanes - rows.rows;  // the first ones
    for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t first = v * kWidth;
        const std::size_t skipped = unused <= first ? 0 : (unused - first < kWidth ? unused - first : kWidth);
        lanes.active[v] = static_cast<__mmask16>(0xFFFFU << skipped);
        lanes.states[v] = _mm512_loadu_si512(growth.states + first);
    }
    for_quads_backwards(columns, rows, [&](const RansRows& block, const QuadTables& tables) {
        __m512i codes[kVectors][kQuadsAtOnce];
        for (std::size_t v = 0; v < kVectors; ++v) load_codes(block, v * kWidth, codes[v]);
        for (std::size_t i = tables.count; i-- > 0;) {
            for (std::size_t v = 0; v < kVectors; ++v) encode_symbol(lanes, v, codes[v][i], tables.intervals[i]);
        }
    });
    for (std::size_t v = 0; v < kVectors; ++v) _mm512_storeu_si512(growth.states + v * kWidth, lanes.states[v]);
    growth.word = lanes.word;
    return lanes.missing == 0;
}

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

bool rans4_encode_avx512(const RansColumns<RansIntervals>& columns, RansGrowth& growth,
                         const TernaryView& rows) noexcept {
    return rans4_encode_portable(columns, growth, rows);
}

}  // namespace torch_offload

#endif
