// Rounding with error feedback for processors with AVX2. Only what stands below the pragma may use its instructions.
#include <cstddef>

#include "codec/error_feedback.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include "codec/error_feedback_loops.h"

namespace torch_offload {
namespace {

struct Avx2Lanes {
    using Vector = float __attribute__((vector_size(32)));
    static constexpr std::size_t kVectors = 2;
    static constexpr std::size_t kColumns = 4;
};

}  // namespace

void round_tile_avx2(const RoundedTile& tile, const float* factor) noexcept { round_tile<Avx2Lanes>(tile, factor); }

void choose_tile_avx2(const RoundedTile& tile, const float* moment) noexcept { choose_tile<Avx2Lanes>(tile, moment); }

}  // namespace torch_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torch_offload {

void round_tile_avx2(const RoundedTile& tile, const float* factor) noexcept { round_tile_portable(tile, factor); }

void choose_tile_avx2(const RoundedTile& tile, const float* moment) noexcept { choose_tile_portable(tile, moment); }

}  // namespace torch_offload

#endif
