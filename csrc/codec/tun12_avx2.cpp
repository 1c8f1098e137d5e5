// Decoding of TUN12 for processors with AVX2: a word is one register or two. Only what stands below the pragma may use
// its instructions.
#include <cstddef>
#include <cstdint>

#include "codec/tun12.h"

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include "codec/tun12_loops.h"

namespace torch_offload {

bool tun12_row_avx2(const TunstallColumns& columns, Tun12Stream& stream, std::int8_t* row) noexcept {
    return decode_row(columns, stream, row);
}

}  // namespace torch_offload

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif
