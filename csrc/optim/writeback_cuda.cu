// The writeback of gradients on CUDA. Bound by memory: 2 (bf16) or 4 (fp32) bytes per element are read, and as many
// written as the type has in which it leaves; 16 bytes per chunk of 16,384 elements for the sums.
#include "base/launch_check.cuh"
#include "optim/cuda_launch.cuh"
#include "optim/writeback_block.h"

namespace torch_offload {
namespace {

__global__ void __launch_bounds__(kTeamLanes)
    writeback_kernel(WritebackArrays arrays, bool is_aligned, WritebackSum* sums) {
    __shared__ WritebackShared shared;
    write_back_chunks(CudaTeam{}, arrays, is_aligned, blockIdx.x, gridDim.x, shared, sums);
}

__global__ void __launch_bounds__(kTeamLanes)
    total_kernel(const WritebackSum* sums, std::size_t chunk_count, WritebackSum* total) {
    __shared__ WritebackShared shared;
    total_chunks(CudaTeam{}, sums, chunk_count, shared, total);
}

}  // namespace

void launch_writeback(const WritebackArrays& arrays, WritebackSum* sums, WritebackSum* total, unsigned block_count,
                      cudaStream_t stream) {
    const std::size_t chunks = writeback_chunks(arrays.count);
    if (chunks > 0) {
        const unsigned blocks = block_count > 0 ? block_count : blocks_for(&writeback_kernel, kTeamLanes, chunks);
        const bool is_aligned = all_aligned({arrays.gradients, arrays.to});
        writeback_kernel<<<blocks, kTeamLanes, 0, stream>>>(arrays, is_aligned, sums);
        check_cuda(cudaGetLastError(), "launching the writeback of a gradient");
    }
    total_kernel<<<1, kTeamLanes, 0, stream>>>(sums, chunks, total);
    check_cuda(cudaGetLastError(), "launching the sum over a gradient");
}

}  // namespace torch_offload
