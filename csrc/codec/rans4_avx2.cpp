// Decoding of RANS4 for processors with AVX2: eight lanes in a register. Only what stands below the pragma may use
// its instructions.
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

namespace torch_offload {
namespace {

constexpr std::size_t kWidth = 8;
constexpr std::size_t kVectors = kRansLanes / kWidth;
constexpr std::size_t kQuadsAtOnce = 4;

/// For each set of lanes that take a word: which of the next words each of them takes.
struct WordOrder {
    alignas(32) std::uint32_t index[256][kWidth];
};
constexpr WordOrder kWordOrder = [] {
    WordOrder order{};
    for (std::uint32_t lanes = 0; lanes < 256; ++lanes) {
        std::uint32_t next = 0;
        for (std::uint32_t lane = 0; lane < kWidth; ++lane) {
            order.index[lanes][lane] = next;
            next += lanes >> lane & 1;
        }
    }
    return order;
}();

struct Lanes {
    __m256i states[kVectors];
    __m256i active[kVectors];  // all bits, or none
    const std::byte* word;
};

/// Two-bit codes in the low byte of each lane as four bytes of -1, 0 and 1.
inline __m256i bytes_of_codes(__m256i slots) noexcept {
    __m256i bytes = _mm256_and_si256(slots, _mm256_set1_epi32(0xFF));
    bytes = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12)), _mm256_set1_epi32(0x000F000F));
    bytes = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 6)), _mm256_set1_epi32(0x03030303));
    const __m256i two = _mm256_set1_epi8(2);
    return _mm256_sub_epi8(_mm256_xor_si256(bytes, two), two);
}

/// One symbol of eight lanes. Lanes whose state has become small take the next words in order.
inline __m256i decode_symbol(Lanes& lanes, std::size_t vector, const std::uint32_t* table) noexcept {
    const __m256i twelve = _mm256_set1_epi32(4095);
    const __m256i state = lanes.states[vector];
    const __m256i slots =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), _mm256_and_si256(state, twelve), 4);
    const __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(slots, 8), twelve);
    const __m256i next = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(state, kFrequencyBits)),
                                          _mm256_srli_epi32(slots, 20));
    const __m256i active = lanes.active[vector];
    const __m256i is_small =
        _mm256_and_si256(active, _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256()));
    const auto small = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(is_small)));
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes.word)));
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kWordOrder.index[small]));
    const __m256i grown = _mm256_or_si256(_mm256_slli_epi32(next, 16), _mm256_permutevar8x32_epi32(words, order));
    lanes.states[vector] = _mm256_blendv_epi8(state, _mm256_blendv_epi8(next, grown, is_small), active);
    lanes.word += 2 * static_cast<std::size_t>(__builtin_popcount(small));
    return bytes_of_codes(slots);
}

/// Four quads of eight lanes to 16 columns of eight rows.
inline void store_rows(const __m256i (&quads)[kQuadsAtOnce], std::size_t first_lane, std::size_t lane_count,
                       const TernaryRows& to, std::size_t column) noexcept {
    const __m256i low01 = _mm256_unpacklo_epi32(quads[0], quads[1]);
    const __m256i high01 = _mm256_unpackhi_epi32(quads[0], quads[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(quads[2], quads[3]);
    const __m256i high23 = _mm256_unpackhi_epi32(quads[2], quads[3]);
    // Part p of number i belongs to lane 4 p + i.
    const __m256i rows[4] = {_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
                             _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)};
    const auto store = [&](std::size_t lane, __m128i values) {
        if (lane >= lane_count) return;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to.row(lane) + column), values);
    };
    for (std::size_t i = 0; i < 4; ++i) {
        store(first_lane + i, _mm256_castsi256_si128(rows[i]));
        store(first_lane + i + 4, _mm256_extracti128_si256(rows[i], 1));
    }
}

}  // namespace

bool rans4_rows_avx2(const RansColumns<RansSlots>& columns, RansStream& stream, std::size_t lane_count,
                     const TernaryRows& to) noexcept {
    Lanes lanes;
    lanes.word = stream.word;
    for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t first = v * kWidth;
        const std::size_t count = lane_count <= first ? 0 : (lane_count - first < kWidth ? lane_count - first : kWidth);
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        lanes.active[v] = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
        lanes.states[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stream.states + first));
    }
    std::size_t index = 0;
    const std::size_t quad_count = columns.quad_count();
    for (std::size_t quad = 0; quad < quad_count; quad += kQuadsAtOnce) {
        __m256i quads[kVectors][kQuadsAtOnce];
        for (std::size_t i = 0; i < kQuadsAtOnce; ++i) {
            if (quad + i >= quad_count) {
                for (std::size_t v = 0; v < kVectors; ++v) quads[v][i] = _mm256_setzero_si256();
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
    for (std::size_t v = 0; v < kVectors; ++v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(stream.states + v * kWidth), lanes.states[v]);
    }
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

bool rans4_rows_avx2(const RansColumns<RansSlots>& columns, RansStream& stream, std::size_t lanes,
                     const TernaryRows& to) noexcept {
    return rans4_rows_portable(columns, stream, lanes, to);
}

}  // namespace torch_offload

#endif
