// Rounding with error feedback for processors with AVX-512. Only what stands below the pragma may use its instructions.
#include <cstddef>

#include "codec/error_feedback.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "codec/error_feedback_loops.h"

namespace torch_offload {
namespace {

struct Avx512Lanes {
    using Vector = float __attribute__((vector_size(64)));
    static constexpr std::size_t kVectors = 4;
    static constexpr std::size_t kColumns = 4;
};

}  // namespace

void round_tile_avx512(const RoundedTile& tile, const float* factor) noexcept { round_tile<Avx512Lanes>(tile, factor); }

void choose_tile_avx512(const RoundedTile& tile, const float* moment) noexcept {
    choose_tile<Avx512Lanes>(tile, moment);
}

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

void round_tile_avx512(const RoundedTile& tile, const float* factor) noexcept { round_tile_portable(tile, factor); }

void choose_tile_avx512(const RoundedTile& tile, const float* moment) noexcept { choose_tile_portable(tile, moment); }

}  // namespace torch_offload

#endif
