// The products for processors with AVX2. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/product.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include "codec/product_loops.h"

namespace torch_offload {
namespace {

/// Two registers, the lower lanes first.
struct Avx2Lanes {
    static constexpr std::size_t kRows = 2;
    static constexpr std::size_t kTokens = 2;

    __m256 low;
    __m256 high;

    static Avx2Lanes zero() noexcept { return of_one(0); }
    static Avx2Lanes of_one(float value) noexcept { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
    static Avx2Lanes load(const float* from) noexcept { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    static void store(Avx2Lanes lanes, float* to) noexcept {
        _mm256_storeu_ps(to, lanes.low);
        _mm256_storeu_ps(to + 8, lanes.high);
    }
    static Avx2Lanes of_ternary(const std::int8_t* from) noexcept { return {eight_of(from), eight_of(from + 8)}; }
    static Avx2Lanes plus_product(Avx2Lanes sum, Avx2Lanes left, Avx2Lanes right) noexcept {
        return {_mm256_add_ps(sum.low, _mm256_mul_ps(left.low, right.low)),
                _mm256_add_ps(sum.high, _mm256_mul_ps(left.high, right.high))};
    }
    static float joined(Avx2Lanes lanes) noexcept {
        const __m256 eight = _mm256_add_ps(lanes.low, lanes.high);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

private:
    static __m256 eight_of(const std::int8_t* from) noexcept {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
};

}  // namespace

void product_avx2(const ProductRows& rows, const TokenPanel& x, TokenPanel& y) noexcept {
    multiply_rows<Avx2Lanes>(rows, x, y);
}

void transposed_product_avx2(const ProductRows& rows, const TokenPanel& g, TokenPanel& z) noexcept {
    multiply_rows_transposed<Avx2Lanes>(rows, g, z);
}

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

void product_avx2(const ProductRows& rows, const TokenPanel& x, TokenPanel& y) noexcept {
    product_portable(rows, x, y);
}

void transposed_product_avx2(const ProductRows& rows, const TokenPanel& g, TokenPanel& z) noexcept {
    transposed_product_portable(rows, g, z);
}

}  // namespace torch_offload

#endif
