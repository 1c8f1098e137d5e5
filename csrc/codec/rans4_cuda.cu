// RANS4 on CUDA: a warp per tile, since the rows of a tile share their words. As many tiles are decoded side by side as
// there are: tiles of few rows (64) keep a GPU busier than those of many.
#include "base/launch_check.cuh"
#include "codec/coded_kernels.cuh"
#include "codec/rans4_warp.h"

namespace torch_offload {
namespace {

/// Shared memory for slots: of four classes. With more of them those of one class are there at a time.
constexpr std::size_t kSlotBytes = kFrequencyTotal * sizeof(std::uint32_t);
constexpr std::uint32_t kMaxStagedClasses = 4;

__global__ void __launch_bounds__(kWarpLanes)
    decode_kernel(const __grid_constant__ KernelMatrix matrix, bool are_staged, const QuadRows to) {
    extern __shared__ std::uint32_t staged[];
    __shared__ RansWindow window;
    for (std::uint32_t i = 0; are_staged && i < matrix.class_count; ++i) {
        fill_slots(CudaWarp{}, matrix.classes[i], staged + i * kFrequencyTotal);
    }
    const auto slots = [&](std::uint32_t index) -> const std::uint32_t* {
        if (are_staged) return staged + index * kFrequencyTotal;
        fill_slots(CudaWarp{}, matrix.classes[index], staged);
        return staged;
    };
    for (std::uint32_t i = blockIdx.x; i < matrix.tile_count; i += gridDim.x) {
        const KernelTile tile = matrix.tiles[i];
        if (tile.coder == Coder::rans4) write_rans_tile(CudaWarp{}, matrix, tile, slots, window, to);
    }
}

}  // namespace

void launch_rans4_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream) {
    const bool are_staged = matrix.class_count <= kMaxStagedClasses;
    const std::size_t shared_bytes = (are_staged ? matrix.class_count : 1) * kSlotBytes;
    check_cuda(cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kMaxStagedClasses * kSlotBytes)),
               "asking for shared memory for the slots of RANS4");
    const unsigned blocks = blocks_for(decode_kernel, kWarpLanes, matrix.tile_count, shared_bytes);
    decode_kernel<<<blocks, kWarpLanes, shared_bytes, stream>>>(matrix, are_staged, to);
    check_cuda(cudaGetLastError(), "launching the decoder of RANS4");
}

}  // namespace torch_offload
