// The loops of the writeback of a gradient, compiled once per instruction set like adamw_loops.h: internal linkage, no
// standard headers. They have the order of writeback.h: vectors run over the sums, which no one reorders.
// Layer optim, without torch.
#pragma once

#include "optim/writeback.h"
#include "optim/writeback_block.h"

namespace torch_offload {
namespace {

/// Sums of one chunk, by element modulo kWritebackRow; they stay in the first cache.
struct RowSums {
    alignas(64) double squares[kWritebackRow] = {};
    std::uint32_t nonfinite_count = 0;

    void add(const float* __restrict values, std::size_t count) noexcept {
        for (std::size_t i = 0; i < count; ++i) squares[i] = with_square(squares[i], values[i]);
        std::uint32_t found = 0;
        for (std::size_t i = 0; i < count; ++i) found += is_nonfinite(values[i]);
        nonfinite_count += found;
    }

    WritebackSum joined() noexcept {
        for (std::size_t half = kGroup / 2; half > 0; half /= 2) {
            for (std::size_t group = 0; group < kWritebackRow; group += kGroup) {
                for (std::size_t i = group; i < group + half; ++i) squares[i] = squares[i] + squares[i + half];
            }
        }
        for (std::size_t half = kWritebackRow / 2; half >= kGroup; half /= 2) {
            for (std::size_t i = 0; i < half; i += kGroup) squares[i] = squares[i] + squares[i + half];
        }
        return {squares[0], nonfinite_count};
    }
};

const float* widened_row(const WritebackArrays& arrays, std::size_t begin, std::size_t count,
                         float* __restrict buffer) noexcept {
    if (arrays.gradient_type == GradientType::f32) return static_cast<const float*>(arrays.gradients) + begin;
    const std::uint16_t* __restrict from = static_cast<const std::uint16_t*>(arrays.gradients) + begin;
    for (std::size_t i = 0; i < count; ++i) buffer[i] = widened(from[i]);
    return buffer;
}

void store_row(const WritebackArrays& arrays, std::size_t begin, std::size_t count, const float* values) noexcept {
    if (arrays.to_type == GradientType::f32) {
        float* to = static_cast<float*>(arrays.to) + begin;
        if (to == values) return;  // it leaves from where it lies
        for (std::size_t i = 0; i < count; ++i) to[i] = values[i];
        return;
    }
    std::uint16_t* to = static_cast<std::uint16_t*>(arrays.to) + begin;
    if (arrays.gradient_type == GradientType::bf16) {
        for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::uint16_t>(bits_of(values[i]) >> 16);
        return;
    }
    for (std::size_t i = 0; i < count; ++i)
        to[i] = static_cast<std::uint16_t>(bits_of(rounded_to_bf16(values[i])) >> 16);
}

WritebackSum write_back_chunk(const WritebackArrays& arrays, std::size_t begin, std::size_t end) noexcept {
    alignas(64) float buffer[kWritebackRow];
    RowSums sums;
    for (; begin < end; begin += kWritebackRow) {
        const std::size_t count = end - begin < kWritebackRow ? end - begin : kWritebackRow;
        const float* values = widened_row(arrays, begin, count, buffer);
        sums.add(values, count);
        if (arrays.to) store_row(arrays, begin, count, values);
    }
    return sums.joined();
}

void write_back_all(const WritebackArrays& arrays, WritebackSum* sums) noexcept {
    for (std::size_t begin = 0; begin < arrays.count; begin += kWritebackChunk) {
        const std::size_t left = arrays.count - begin;
        sums[begin / kWritebackChunk] =
            write_back_chunk(arrays, begin, begin + (left < kWritebackChunk ? left : kWritebackChunk));
    }
}

}  // namespace
}  // namespace torch_offload
