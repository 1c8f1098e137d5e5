// The products for processors with AVX-512. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/product_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "codec/product_avx512_lanes.h"
#include "codec/product_forward.h"
#include "codec/product_transposed.h"

namespace torch_offload {
namespace {

/// Two products fit 16 bits: no more than 512.
struct SumByHalves {
    static __m512i plus_products(__m512i sums, __m512i weights, __m512i bytes) noexcept {
        const __m512i twos = _mm512_maddubs_epi16(weights, bytes);
        return _mm512_add_epi32(sums, _mm512_madd_epi16(twos, _mm512_set1_epi16(1)));
    }
};

using Lanes = Avx512Lanes<SumByHalves>;

}  // namespace

constexpr ProductKernels kAvx512Products = {write_token<Lanes>, multiply_rows<Lanes>, multiply_rows_transposed<Lanes>};

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
