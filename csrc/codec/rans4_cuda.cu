// RANS4 on CUDA: a warp per tile, since the rows of a tile share their words. As many tiles are decoded side by side as
// there are: tiles of few rows (64) keep a GPU busier than those of many.
#include "base/launch_check.cuh"
#include "codec/coded_kernels.cuh"
#include "codec/rans4_warp.h"

namespace torch_offload {
namespace {

/// Shared memory for slots: four classes. With more of them slots are read from where they are.
constexpr std::size_t kSlotBytes = kFrequencyTotal * sizeof(std::uint32_t);
constexpr std::size_t kMaxStagedBytes = 4 * kSlotBytes;

__global__ void __launch_bounds__(kWarpLanes)
    decode_kernel(const __grid_constant__ KernelMatrix matrix, bool is_staged, const QuadRows to) {
    extern __shared__ std::uint32_t staged[];
    __shared__ RansWindow window;
    for (std::uint32_t i = 0; is_staged && i < matrix.class_count * kFrequencyTotal; i += kWarpLanes) {
        const std::uint32_t slot = i + threadIdx.x;
        staged[slot] = matrix.classes[slot / kFrequencyTotal].slots[slot % kFrequencyTotal];
    }
    __syncwarp();
    const auto slots = [&](std::uint32_t index) -> const std::uint32_t* {
        return is_staged ? staged + index * kFrequencyTotal : matrix.classes[index].slots;
    };
    for (std::uint32_t i = blockIdx.x; i < matrix.tile_count; i += gridDim.x) {
        const KernelTile tile = matrix.tiles[i];
        if (tile.coder == Coder::rans4) write_rans_tile(CudaWarp{}, matrix, tile, slots, window, to);
    }
}

}  // namespace

void launch_rans4_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream) {
    const std::size_t slot_bytes = matrix.class_count * kSlotBytes;
    const bool is_staged = slot_bytes <= kMaxStagedBytes;
    const std::size_t shared_bytes = is_staged ? slot_bytes : 0;
    check_cuda(cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kMaxStagedBytes)),
               "asking for shared memory for the slots of RANS4");
    const unsigned blocks = blocks_for(decode_kernel, kWarpLanes, matrix.tile_count, shared_bytes);
    decode_kernel<<<blocks, kWarpLanes, shared_bytes, stream>>>(matrix, is_staged, to);
    check_cuda(cudaGetLastError(), "launching the decoder of RANS4");
}

}  // namespace torch_offload
