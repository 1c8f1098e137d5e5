// The products for processors with AVX-512. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/product_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,popcnt,prefer-vector-width=512")
#endif

#include "codec/product_avx512_lanes.h"
#include "codec/product_forward.h"
#include "codec/product_transposed.h"

namespace torch_offload {
namespace {

struct WithoutBytes {
    static constexpr std::size_t kMinTokens = 16;

    /// Two products fit 16 bits: no more than 512.
    static __m512i plus_products(__m512i sums, __m512i weights, __m512i bytes) noexcept {
        const __m512i twos = _mm512_maddubs_epi16(weights, bytes);
        return _mm512_add_epi32(sums, _mm512_madd_epi16(twos, _mm512_set1_epi16(1)));
    }
    static std::size_t append(std::size_t column, std::uint64_t mask, std::uint16_t* to) noexcept {
        std::size_t count = 0;
        __m512i columns = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(column)),
                                           _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        for (unsigned first = 0; first < 64; first += 16, mask >>= 16) {
            const auto sixteen = static_cast<__mmask16>(mask);
            const __m256i listed = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(sixteen, columns));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + count), listed);
            count += static_cast<std::size_t>(__builtin_popcount(sixteen));
            columns = _mm512_add_epi32(columns, _mm512_set1_epi32(16));
        }
        return count;
    }
    static void list(const std::int8_t* row, std::size_t count, ColumnLists& lists) noexcept {
        list_by_masks(row, count, lists, append);
    }
};

using Lanes = Avx512Lanes<WithoutBytes>;

}  // namespace

constexpr ProductKernels kAvx512Products = {write_token<Lanes>, multiply_rows<Lanes>, multiply_rows_transposed<Lanes>,
                                            Lanes::kMinTokens};

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

const ProductKernels kAvx512Products = kPortableProducts;

}  // namespace torch_offload

#endif
