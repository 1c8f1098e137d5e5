// What the launches of kernels have in common. Layer base, for .cu sources only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "base/check.h"

namespace torch_offload {

inline void check_cuda(cudaError_t result, const char* what) {
    OFFLOAD_CHECK(result == cudaSuccess, OffloadError, "CUDA: ", what, " failed: ", cudaGetErrorName(result), ", ",
                  cudaGetErrorString(result));
}

/// Blocks for `piece_count` pieces of work: as many as the device holds at a time, not more than there are pieces.
/// `shared_bytes`: of shared memory that the launch gives each block.
template <typename Kernel>
unsigned blocks_for(Kernel* kernel, std::size_t block_threads, std::size_t piece_count, std::size_t shared_bytes = 0) {
    int device = 0;
    int processors = 0;
    int blocks_each = 0;
    check_cuda(cudaGetDevice(&device), "asking for the current device");
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
               "asking for its processors");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, static_cast<int>(block_threads),
                                                             shared_bytes),
               "asking for the occupancy of a kernel");
    const auto held = static_cast<std::size_t>(processors) * static_cast<std::size_t>(std::max(blocks_each, 1));
    return static_cast<unsigned>(std::clamp<std::size_t>(piece_count, 1, held));
}

/// Whether all that are there begin at a multiple of 16 bytes, the widest load.
inline bool all_aligned(std::initializer_list<const void*> pointers) {
    return std::all_of(pointers.begin(), pointers.end(),
                       [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; });
}

}  // namespace torch_offload
