// Vectors of AVX-512 for product_loops.h, but for sums of products and lists, of which there are two. To be included
// where its instructions may be used: internal linkage, no standard headers. Layer codec: includes base only.
#pragma once

#include "codec/product_loops.h"
#include "codec/product_sparse.h"

namespace torch_offload {
namespace {

/// `More` has plus_products(), which adds products of bytes by fours; list(); and kMinTokens.
template <typename More>
struct Avx512Lanes : More {
    static constexpr std::size_t kBytes = 64;
    static constexpr std::size_t kPlanes = 4;

    using Bytes = __m512i;
    using Sums = __m512i;

    static Sums zero() noexcept { return _mm512_setzero_si512(); }
    static Sums load(const std::int32_t* from) noexcept { return _mm512_loadu_si512(from); }
    static void store(Sums lanes, std::int32_t* to) noexcept { _mm512_storeu_si512(to, lanes); }
    static Sums plus_products(Sums lanes, Bytes weights, Bytes bytes) noexcept {
        return More::plus_products(lanes, weights, bytes);
    }
    static void join(const Sums (&lanes)[kRowsTogether], std::int32_t* to) noexcept {
        const __m512i twos = twos_of(lanes[0], lanes[1]);
        const __m512i others = twos_of(lanes[2], lanes[3]);
        const __m512i fours =
            _mm512_add_epi32(_mm512_unpacklo_epi64(twos, others), _mm512_unpackhi_epi64(twos, others));
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), four);
    }
    static Bytes no_weights() noexcept { return _mm512_setzero_si512(); }
    static Bytes weights(const std::int8_t* from) noexcept {
        return _mm512_add_epi8(_mm512_loadu_si512(from), _mm512_set1_epi8(1));
    }
    static Bytes bytes(const std::int8_t* from) noexcept { return _mm512_loadu_si512(from); }
    static Bytes four_bytes(const std::int8_t* from) noexcept {
        std::int32_t four;
        __builtin_memcpy(&four, from, sizeof(four));
        return _mm512_set1_epi32(four);
    }
    /// Unpacking works in quarters: columns are first put where it leaves them in order.
    static void interleave(const Bytes (&rows)[kRowsTogether], Bytes (&to)[kRowsTogether]) noexcept {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        __m512i in[kRowsTogether];
#pragma GCC unroll 4
        for (std::size_t r = 0; r < kRowsTogether; ++r) in[r] = _mm512_permutexvar_epi32(order, rows[r]);
        const __m512i low01 = _mm512_unpacklo_epi8(in[0], in[1]);
        const __m512i high01 = _mm512_unpackhi_epi8(in[0], in[1]);
        const __m512i low23 = _mm512_unpacklo_epi8(in[2], in[3]);
        const __m512i high23 = _mm512_unpackhi_epi8(in[2], in[3]);
        to[0] = _mm512_unpacklo_epi16(low01, low23);
        to[1] = _mm512_unpackhi_epi16(low01, low23);
        to[2] = _mm512_unpacklo_epi16(high01, high23);
        to[3] = _mm512_unpackhi_epi16(high01, high23);
    }
    static void round(const float* from, const PowerOfTwo& power, std::int32_t* to) noexcept {
        const __m512 once = _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(power.first));
        store(_mm512_cvtps_epi32(_mm512_mul_ps(once, _mm512_set1_ps(power.second))), to);
    }

private:
    /// Neighbours: of `first`, of `second`, in turn.
    static __m512i twos_of(__m512i first, __m512i second) noexcept {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(first, second), _mm512_unpackhi_epi32(first, second));
    }
};

/// Has `append(column, mask, to)` put down the columns of each sign, 64 at a time; it says how many they were.
template <typename Append>
inline void list_by_masks(const std::int8_t* row, std::size_t count, ColumnLists& lists, Append append) noexcept {
    std::size_t plus_count = 0;
    std::size_t minus_count = 0;
    for (std::size_t column = 0; column < count; column += 64) {
        const __m512i values = _mm512_loadu_si512(row + column);
        const std::uint64_t minus = _mm512_movepi8_mask(values);
        const std::uint64_t plus = _mm512_test_epi8_mask(values, values) & ~minus;
        plus_count += append(column, plus, lists.plus.columns + plus_count);
        minus_count += append(column, minus, lists.minus.columns + minus_count);
    }
    lists.plus.count = plus_count;
    lists.minus.count = minus_count;
}

}  // namespace
}  // namespace torch_offload
