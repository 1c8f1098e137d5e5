// Rounding with error feedback for any processor: the reference that the others are compared with.
#include "codec/error_feedback_loops.h"

namespace torch_offload {
namespace {

struct PortableLanes {
    using Vector = float __attribute__((vector_size(16)));
    static constexpr std::size_t kVectors = 2;
    static constexpr std::size_t kColumns = 4;
};

}  // namespace

void round_tile_portable(const RoundedTile& tile, const float* factor) noexcept {
    round_tile<PortableLanes>(tile, factor);
}

void choose_tile_portable(const RoundedTile& tile, const float* moment) noexcept {
    choose_tile<PortableLanes>(tile, moment);
}

}  // namespace torch_offload
