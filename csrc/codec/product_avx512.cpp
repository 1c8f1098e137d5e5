// The products for processors with AVX-512. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/product.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "codec/product_loops.h"

namespace torch_offload {
namespace {

/// One register. A fused operation has the bits of two, for the product is exact.
struct Avx512Lanes {
    static constexpr std::size_t kRows = 4;
    static constexpr std::size_t kTokens = 4;

    __m512 values;

    static Avx512Lanes zero() noexcept { return {_mm512_setzero_ps()}; }
    static Avx512Lanes of_one(float value) noexcept { return {_mm512_set1_ps(value)}; }
    static Avx512Lanes load(const float* from) noexcept { return {_mm512_loadu_ps(from)}; }
    static void store(Avx512Lanes lanes, float* to) noexcept { _mm512_storeu_ps(to, lanes.values); }
    static Avx512Lanes of_ternary(const std::int8_t* from) noexcept {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
    }
    static Avx512Lanes plus_product(Avx512Lanes sum, Avx512Lanes left, Avx512Lanes right) noexcept {
        return {_mm512_fmadd_ps(left.values, right.values, sum.values)};
    }
    static float joined(Avx512Lanes lanes) noexcept {
        const __m256 eight =
            _mm256_add_ps(_mm512_castps512_ps256(lanes.values), _mm512_extractf32x8_ps(lanes.values, 1));
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
};

}  // namespace

void product_avx512(const ProductRows& rows, const TokenPanel& x, TokenPanel& y) noexcept {
    multiply_rows<Avx512Lanes>(rows, x, y);
}

void transposed_product_avx512(const ProductRows& rows, const TokenPanel& g, TokenPanel& z) noexcept {
    multiply_rows_transposed<Avx512Lanes>(rows, g, z);
}

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

void product_avx512(const ProductRows& rows, const TokenPanel& x, TokenPanel& y) noexcept {
    product_portable(rows, x, y);
}

void transposed_product_avx512(const ProductRows& rows, const TokenPanel& g, TokenPanel& z) noexcept {
    transposed_product_portable(rows, g, z);
}

}  // namespace torch_offload

#endif
