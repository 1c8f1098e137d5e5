#include "codec/error_feedback.h"

#include <algorithm>
#include <memory>
#include <new>

namespace torch_offload {
namespace {

constexpr std::align_val_t kTileAlignment{64};

struct Kernels {
    RoundingKernel* round;
    RoundingKernel* choose;
};

Kernels kernels_of(InstructionSet set) noexcept {
    if (set == InstructionSet::avx512) return {round_tile_avx512, choose_tile_avx512};
    if (set == InstructionSet::avx2) return {round_tile_avx2, choose_tile_avx2};
    return {round_tile_portable, choose_tile_portable};
}

/// Some rows of a matrix with what is needed to round them.
class TileOfRows {
public:
    TileOfRows(const RoundedMatrix& matrix, std::size_t first)
        : matrix_(matrix), first_(first), count_(std::min(kRoundedRows, matrix.rows - first)) {
        const std::size_t floats = matrix.columns * kRoundedRows;
        memory_.reset(static_cast<float*>(operator new[](3 * floats * sizeof(float), kTileAlignment)));
        std::fill_n(memory_.get(), 3 * floats, 0.0F);
        tile_ = {matrix.columns, matrix.steps,           matrix.thresholds,
                 memory_.get(),  memory_.get() + floats, memory_.get() + 2 * floats};
    }

    const RoundedTile& tile() const noexcept { return tile_; }

    /// Columns of [columns, rows] to those of the tile.
    void load(const float* from, float* to) const noexcept {
        for (std::size_t column = 0; column < matrix_.columns; ++column) {
            std::copy_n(from + column * matrix_.rows + first_, count_, to + column * kRoundedRows);
        }
    }

    void store_values() const noexcept {
        for (std::size_t column = 0; column < matrix_.columns; ++column) {
            std::copy_n(tile_.values + column * kRoundedRows, count_, matrix_.values + column * matrix_.rows + first_);
        }
    }

private:
    struct Free {
        void operator()(float* memory) const noexcept { operator delete[](memory, kTileAlignment); }
    };
    const RoundedMatrix& matrix_;
    std::size_t first_;
    std::size_t count_;
    std::unique_ptr<float[], Free> memory_;
    RoundedTile tile_;
};

}  // namespace

void round_rows(const RoundedMatrix& matrix, const float* factor, std::size_t first, InstructionSet set) {
    const TileOfRows rows(matrix, first);
    rows.load(matrix.exact, rows.tile().rest);
    kernels_of(set).round(rows.tile(), factor);
    rows.store_values();
}

void refine(const RoundedMatrix& matrix, const float* moment, std::size_t first, InstructionSet set) {
    const TileOfRows rows(matrix, first);
    const RoundedTile& tile = rows.tile();
    rows.load(matrix.exact, tile.errors);
    rows.load(matrix.values, tile.values);
    for (std::size_t i = 0; i < matrix.columns * kRoundedRows; ++i) {
        tile.errors[i] -= tile.values[i] * matrix.steps[i / kRoundedRows];
    }
    kernels_of(set).choose(tile, moment);
    rows.store_values();
}

}  // namespace torch_offload
