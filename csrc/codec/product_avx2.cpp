// The products for processors with AVX2. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/product_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include "codec/product_forward.h"
#include "codec/product_transposed.h"

namespace torch_offload {
namespace {

struct Avx2Lanes {
    static constexpr std::size_t kBytes = 32;
    static constexpr std::size_t kPlanes = 2;
    static constexpr std::size_t kMinTokens = kNeverByColumn;  // lists take too long

    using Bytes = __m256i;
    using Sums = __m256i;

    static Sums zero() noexcept { return _mm256_setzero_si256(); }
    static Sums load(const std::int32_t* from) noexcept { return loaded(from); }
    static void store(Sums lanes, std::int32_t* to) noexcept {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), lanes);
    }
    /// Two products fit 16 bits: no more than 512.
    static Sums plus_products(Sums lanes, Bytes weights, Bytes bytes) noexcept {
        const __m256i twos = _mm256_maddubs_epi16(weights, bytes);
        return _mm256_add_epi32(lanes, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
    }
    static void join(const Sums (&lanes)[kRowsTogether], std::int32_t* to) noexcept {
        const __m256i halves =
            _mm256_hadd_epi32(_mm256_hadd_epi32(lanes[0], lanes[1]), _mm256_hadd_epi32(lanes[2], lanes[3]));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), four);
    }
    static Bytes no_weights() noexcept { return _mm256_setzero_si256(); }
    static Bytes weights(const std::int8_t* from) noexcept {
        return _mm256_add_epi8(loaded(from), _mm256_set1_epi8(1));
    }
    static Bytes bytes(const std::int8_t* from) noexcept { return loaded(from); }
    static Bytes four_bytes(const std::int8_t* from) noexcept {
        std::int32_t four;
        __builtin_memcpy(&four, from, sizeof(four));
        return _mm256_set1_epi32(four);
    }
    /// Unpacking works in halves: columns are first put where it leaves them in order.
    static void interleave(const Bytes (&rows)[kRowsTogether], Bytes (&to)[kRowsTogether]) noexcept {
        const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        __m256i in[kRowsTogether];
#pragma GCC unroll 4
        for (std::size_t r = 0; r < kRowsTogether; ++r) in[r] = _mm256_permutevar8x32_epi32(rows[r], order);
        const __m256i low01 = _mm256_unpacklo_epi8(in[0], in[1]);
        const __m256i high01 = _mm256_unpackhi_epi8(in[0], in[1]);
        const __m256i low23 = _mm256_unpacklo_epi8(in[2], in[3]);
        const __m256i high23 = _mm256_unpackhi_epi8(in[2], in[3]);
        to[0] = _mm256_unpacklo_epi16(low01, low23);
        to[1] = _mm256_unpackhi_epi16(low01, low23);
        to[2] = _mm256_unpacklo_epi16(high01, high23);
        to[3] = _mm256_unpackhi_epi16(high01, high23);
    }
    static void round(const float* from, const PowerOfTwo& power, std::int32_t* to) noexcept {
        const __m256 once = _mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(power.first));
        store(_mm256_cvtps_epi32(_mm256_mul_ps(once, _mm256_set1_ps(power.second))), to);
    }

private:
    static __m256i loaded(const void* from) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
};

}  // namespace

constexpr ProductKernels kAvx2Products = {write_token<Avx2Lanes>, multiply_rows<Avx2Lanes>,
                                          multiply_rows_transposed<Avx2Lanes>, Avx2Lanes::kMinTokens};

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

const ProductKernels kAvx2Products = kPortableProducts;

}  // namespace torch_offload

#endif
