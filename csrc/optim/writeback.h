// The writeback of a gradient: one pass over it that casts it to the type in which it leaves, sums its squares and
// counts what is not finite. The same bits on every processor, on CUDA, for any number of threads. Layer optim, without
// torch.
//
// Order of the sum, in double, where the square of a float is exact. Chunks of kWritebackChunk elements are summed
// apart: element i of a chunk goes to sum i mod kWritebackRow, sums are joined within eight neighbours by halves
// (0 with 4, 1 with 5, ...; then 0 with 2, 1 with 3; then 0 with 1), then across the groups of eight likewise. Of the
// chunks' sums number i goes to sum i mod kTeamLanes, in order, and these are joined by halves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/adamw_kernels.h"
#include "optim/thread_team.h"

namespace torch_offload {

inline constexpr std::size_t kWritebackRow = kTeamLanes * kGroup;
inline constexpr std::size_t kWritebackChunk = 8 * kWritebackRow;

/// `count` elements of a gradient. The two arrays may be one if they have one type, and may not overlap otherwise.
struct WritebackArrays {
    std::size_t count = 0;
    const void* gradients = nullptr;  // [count] of gradient_type
    GradientType gradient_type = GradientType::bf16;
    void* to = nullptr;  // [count] of to_type, or nullptr: only looked at
    GradientType to_type = GradientType::bf16;
};

/// Of a chunk, or of a whole gradient. The sum is inf or not-a-number if an element is.
struct WritebackSum {
    double squares = 0;
    std::uint64_t nonfinite_count = 0;
};

OFFLOAD_HOST_DEVICE constexpr std::size_t writeback_chunks(std::size_t count) noexcept {
    return (count + kWritebackChunk - 1) / kWritebackChunk;
}

/// Casts (to bf16: nearest, ties to even) and writes one sum per chunk.
/// `sums`: [writeback_chunks(count)]. A gradient may be cut between chunks.
void write_back_gradients(const WritebackArrays& arrays, WritebackSum* sums,
                          InstructionSet set = best_instruction_set()) noexcept;

/// The sum of a whole gradient by its chunks'.
WritebackSum total_writeback(const WritebackSum* sums, std::size_t chunk_count) noexcept;

/// The kernels themselves, one per source file. Pre: the set is available.
using WritebackKernel = void(const WritebackArrays&, WritebackSum*) noexcept;
WritebackKernel writeback_portable;
WritebackKernel writeback_avx2;
WritebackKernel writeback_avx512;

}  // namespace torch_offload
