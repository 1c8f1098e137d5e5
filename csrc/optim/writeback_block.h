// The writeback of a gradient as a team of threads does it; writeback.h has the order of the sum. Internal linkage like
// adamw_element.h. Layer optim, without torch.
#pragma once

#include "optim/adamw_element.h"
#include "optim/thread_team.h"
#include "optim/writeback.h"

namespace torch_offload {
namespace {

/// The square of a float is exact in double, so a fused operation has the bits of two.
OFFLOAD_HOST_DEVICE inline double with_square(double sum, float value) noexcept {
    const auto wide = static_cast<double>(value);
#ifdef __CUDA_ARCH__
    return __fma_rn(wide, wide, sum);
#else
    return sum + wide * wide;
#endif
}

OFFLOAD_HOST_DEVICE inline std::uint32_t is_nonfinite(float value) noexcept {
    return (bits_of(value) & 0x7F800000) == 0x7F800000 ? 1 : 0;
}

/// What lanes tell each other.
struct WritebackShared {
    double squares[kTeamLanes];
    std::uint64_t nonfinite_counts[kTeamLanes];
};

OFFLOAD_DEVICE inline void load_gradient_group(const void* gradients, GradientType type, std::size_t begin,
                                               std::size_t count, bool is_aligned, float (&to)[kGroup]) noexcept {
    if (type == GradientType::f32) {
        return load_group(static_cast<const float*>(gradients) + begin, count, is_aligned, to);
    }
    alignas(16) std::uint16_t halves[kGroup];
    load_group(static_cast<const std::uint16_t*>(gradients) + begin, count, is_aligned, halves);
    for (std::size_t i = 0; i < kGroup; ++i) to[i] = widened(halves[i]);
}

/// Not-a-numbers become one where they are rounded, and keep their bits otherwise.
OFFLOAD_DEVICE inline void store_written(const WritebackArrays& arrays, std::size_t begin, std::size_t count,
                                         bool is_aligned, const float (&values)[kGroup]) noexcept {
    if (arrays.to_type == GradientType::f32) {
        return store_group(values, count, is_aligned, static_cast<float*>(arrays.to) + begin);
    }
    const bool is_exact = arrays.gradient_type == GradientType::bf16;
    alignas(16) std::uint16_t halves[kGroup];
    for (std::size_t i = 0; i < kGroup; ++i) {
        const float rounded = is_exact ? values[i] : rounded_to_bf16(values[i]);
        halves[i] = static_cast<std::uint16_t>(bits_of(rounded) >> 16);
    }
    store_group(halves, count, is_aligned, static_cast<std::uint16_t*>(arrays.to) + begin);
}

/// One lane's part of a chunk: a group of each row.
OFFLOAD_DEVICE inline WritebackSum write_back_lane(const WritebackArrays& arrays, bool is_aligned, std::size_t begin) {
    double sums[kGroup] = {};
    std::uint32_t nonfinite_count = 0;
    for (std::size_t row = 0; row < kWritebackChunk / kWritebackRow; ++row, begin += kWritebackRow) {
        alignas(16) float values[kGroup];
        const std::size_t count = group_count(begin, arrays.count);
        if (count == 0) break;
        load_gradient_group(arrays.gradients, arrays.gradient_type, begin, count, is_aligned, values);
        if (arrays.to) store_written(arrays, begin, count, is_aligned, values);
        for (std::size_t i = 0; i < kGroup; ++i) {
            sums[i] = with_square(sums[i], values[i]);
            nonfinite_count += is_nonfinite(values[i]);
        }
    }
    for (std::size_t half = kGroup / 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
    }
    return {sums[0], nonfinite_count};
}

/// The lanes' sums joined; the first lane writes the result.
template <typename Team>
OFFLOAD_DEVICE void join_writebacks(const Team& team, WritebackShared& shared, WritebackSum* to) {
    const auto sum = [](auto one, auto other) { return one + other; };
    join_by_halves(team, shared.squares, sum);
    join_by_halves(team, shared.nonfinite_counts, sum);
    team.each([&](std::size_t lane) {
        if (lane == 0) *to = {shared.squares[0], shared.nonfinite_counts[0]};
    });
}

/// Chunks `first`, `first + stride`, ...: each has its own sum, so it does not matter which team takes it.
template <typename Team>
OFFLOAD_DEVICE void write_back_chunks(const Team& team, const WritebackArrays& arrays, bool is_aligned,
                                      std::size_t first, std::size_t stride, WritebackShared& shared,
                                      WritebackSum* sums) {
    for (std::size_t chunk = first; chunk < writeback_chunks(arrays.count); chunk += stride) {
        team.each([&](std::size_t lane) {
            const WritebackSum sum = write_back_lane(arrays, is_aligned, chunk * kWritebackChunk + lane * kGroup);
            shared.squares[lane] = sum.squares;
            shared.nonfinite_counts[lane] = sum.nonfinite_count;
        });
        join_writebacks(team, shared, sums + chunk);
    }
}

/// One team for all chunks' sums.
template <typename Team>
OFFLOAD_DEVICE void total_chunks(const Team& team, const WritebackSum* sums, std::size_t chunk_count,
                                 WritebackShared& shared, WritebackSum* total) {
    team.each([&](std::size_t lane) {
        WritebackSum sum{0, 0};
        for (std::size_t chunk = lane; chunk < chunk_count; chunk += kTeamLanes) {
            sum.squares = sum.squares + sums[chunk].squares;
            sum.nonfinite_count += sums[chunk].nonfinite_count;
        }
        shared.squares[lane] = sum.squares;
        shared.nonfinite_counts[lane] = sum.nonfinite_count;
    });
    join_writebacks(team, shared, total);
    team.each([&](std::size_t lane) {
        const bool is_nan = lane == 0 && total->squares != total->squares;
        if (is_nan) total->squares = __builtin_bit_cast(double, std::uint64_t{0x7FF8} << 48);
    });
}

}  // namespace
}  // namespace torch_offload
