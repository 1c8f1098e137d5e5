// Decoding of RANS4 for processors with AVX-512: sixteen lanes in a register. Only what stands below the pragma may use
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

namespace torch_offload {
namespace {

constexpr std::size_t kWidth = 16;
constexpr std::size_t kVectors = kRansLanes / kWidth;
constexpr std::size_t kQuadsAtOnce = 4;

struct Lanes {
    __m512i states[kVectors];
    __mmask16 active[kVectors];
    const std::byte* word;
};

/// Two-bit codes in the low byte of each lane as four bytes of -1, 0 and 1.
inline __m512i bytes_of_codes(__m512i slots) noexcept {
    __m512i bytes = _mm512_and_si512(slots, _mm512_set1_epi32(0xFF));
    bytes = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), _mm512_set1_epi32(0x000F000F));
    bytes = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 6)), _mm512_set1_epi32(0x03030303));
    const __m512i two = _mm512_set1_epi8(2);
    return _mm512_sub_epi8(_mm512_xor_si512(bytes, two), two);
}

/// One symbol of sixteen lanes. Lanes whose state has become small take the next words in order.
inline __m512i decode_symbol(Lanes& lanes, std::size_t vector, const std::uint32_t* table) noexcept {
    const __m512i twelve = _mm512_set1_epi32(4095);
    const __m512i state = lanes.states[vector];
    const __m512i slots = _mm512_i32gather_epi32(_mm512_and_si512(state, twelve), table, 4);
    const __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(slots, 8), twelve);
    const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, kFrequencyBits)),
                                          _mm512_srli_epi32(slots, 20));
    const __mmask16 active = lanes.active[vector];
    const __mmask16 is_small = _mm512_mask_cmplt_epu32_mask(active, next, _mm512_set1_epi32(kRansFloor));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes.word)));
    const __m512i grown =
        _mm512_mask_or_epi32(next, is_small, _mm512_slli_epi32(next, 16), _mm512_maskz_expand_epi32(is_small, words));
    lanes.states[vector] = _mm512_mask_mov_epi32(state, active, grown);
    lanes.word += 2 * static_cast<std::size_t>(__builtin_popcount(is_small));
    return bytes_of_codes(slots);
}

/// Four quads of sixteen lanes to 16 columns of sixteen rows.
inline void store_rows(const __m512i (&quads)[kQuadsAtOnce], std::size_t first_lane, std::size_t lane_count,
                       const TernaryRows& to, std::size_t column) noexcept {
    const __m512i low01 = _mm512_unpacklo_epi32(quads[0], quads[1]);
    const __m512i high01 = _mm512_unpackhi_epi32(quads[0], quads[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(quads[2], quads[3]);
    const __m512i high23 = _mm512_unpackhi_epi32(quads[2], quads[3]);
    // Part p of number i belongs to lane 4 p + i.
    alignas(64) __m512i rows[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                                   _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
    const auto store = [&](std::size_t lane, __m128i values) {
        if (lane >= lane_count) return;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to.row(lane) + column), values);
    };
    for (std::size_t i = 0; i < 4; ++i) {
        store(first_lane + i, _mm512_castsi512_si128(rows[i]));
        store(first_lane + i + 4, _mm512_extracti32x4_epi32(rows[i], 1));
        store(first_lane + i + 8, _mm512_extracti32x4_epi32(rows[i], 2));
        store(first_lane + i + 12, _mm512_extracti32x4_epi32(rows[i], 3));
    }
}

}  // namespace

bool rans4_rows_avx512(const RansColumns<RansSlots>& columns, RansStream& stream, std::size_t lane_count,
                       const TernaryRows& to) noexcept {
    Lanes lanes;
    lanes.word = stream.word;
    for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t first = v * kWidth;
        const std::size_t count = lane_count <= first ? 0 : (lane_count - first < kWidth ? lane_count - first : kWidth);
        lanes.active[v] = static_cast<__mmask16>((1U << count) - 1);
        lanes.states[v] = _mm512_loadu_si512(stream.states + first);
    }
    std::size_t index = 0;
    const std::size_t quad_count = columns.quad_count();
    for (std::size_t quad = 0; quad < quad_count; quad += kQuadsAtOnce) {
        __m512i quads[kVectors][kQuadsAtOnce];
        for (std::size_t i = 0; i < kQuadsAtOnce; ++i) {
            if (quad + i >= quad_count) {
                for (std::size_t v = 0; v < kVectors; ++v) quads[v][i] = _mm512_setzero_si512();
                continue;
            }
            while (quad + i >= columns.end_quad(index)) ++index;
            const std::uint32_t* const table = columns.tables[index].data();
            for (std::size_t v = 0; v < kVectors; ++v) quads[v][i] = decode_symbol(lanes, v, table);
            if (lanes.word > stream.end) return false;
        }
        for (std::size_t v = 0; v < kVectors; ++v) {
            store_rows(quads[v], v * kWidth, lane_count, to, quad * kQuad);
        }
    }
    for (std::size_t v = 0; v < kVectors; ++v) _mm512_storeu_si512(stream.states + v * kWidth, lanes.states[v]);
    stream.word = lanes.word;
    return true;
}

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

bool rans4_rows_avx512(const RansColumns<RansSlots>& columns, RansStream& stream, std::size_t lanes,
                       const TernaryRows& to) noexcept {
    return rans4_rows_portable(columns, stream, lanes, to);
}

}  // namespace torch_offload

#endif
