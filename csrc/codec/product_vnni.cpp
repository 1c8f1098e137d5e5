// The products for processors with AVX-512, its VNNI and VBMI2. Only what stands below the pragma may use its
// instructions.
#include <cstddef>
#include <cstdint>

#include "codec/intrinsics.h"
#include "codec/product_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi2,popcnt,prefer-vector-width=512")
#endif

#include "codec/product_avx512_lanes.h"
#include "codec/product_forward.h"
#include "codec/product_transposed.h"

namespace torch_offload {
namespace {

struct WithBytes {
    static constexpr std::size_t kMinTokens = 8;

    static __m512i plus_products(__m512i sums, __m512i weights, __m512i bytes) noexcept {
        return _mm512_dpbusd_epi32(sums, weights, bytes);
    }
    static void list(const std::int8_t* row, std::size_t count, ColumnLists& lists) noexcept {
        std::uint16_t* plus = lists.plus.columns;
        std::uint16_t* minus = lists.minus.columns;
        __m512i columns = _mm512_loadu_si512(kNumbers.of);
        for (std::size_t column = 0; column < count; column += 64) {
            const __m512i values = _mm512_loadu_si512(row + column);
            std::uint64_t below = _mm512_movepi8_mask(values);
            std::uint64_t above = _mm512_test_epi8_mask(values, values) & ~below;
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, above >>= 32, below >>= 32) {
                plus = append(plus, static_cast<__mmask32>(above), columns);
                minus = append(minus, static_cast<__mmask32>(below), columns);
                columns = _mm512_add_epi16(columns, _mm512_set1_epi16(32));
            }
        }
        lists.plus.count = static_cast<std::size_t>(plus - lists.plus.columns);
        lists.minus.count = static_cast<std::size_t>(minus - lists.minus.columns);
    }

private:
    static std::uint16_t* append(std::uint16_t* to, __mmask32 mask, __m512i columns) noexcept {
        _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(mask, columns));
        return to + __builtin_popcount(mask);
    }
    /// 0 to 31.
    struct Numbers {
        std::uint16_t of[32];

        constexpr Numbers() noexcept : of{} {
            for (std::uint16_t i = 0; i < 32; ++i) of[i] = i;
        }
    };
    static const Numbers kNumbers;
};

constexpr WithBytes::Numbers WithBytes::kNumbers{};

using Lanes = Avx512Lanes<WithBytes>;

}  // namespace

constexpr ProductKernels kVnniProducts = {write_token<Lanes>, multiply_rows<Lanes>, multiply_rows_transposed<Lanes>,
                                          Lanes::kMinTokens};

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

const ProductKernels kVnniProducts = kPortableProducts;

}  // namespace torch_offload

#endif
