// Decoding of TUN12 for processors with AVX-512: a word is one register. Only what stands below the pragma may use
// its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/tun12.h"

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "codec/tun12_loops.h"

namespace torch_offload {

bool tun12_row_avx512(const TunstallColumns& columns, Tun12Stream& stream, std::int8_t* row) noexcept {
    return decode_row(columns, stream, row);
}

}  // namespace torch_offload

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif
