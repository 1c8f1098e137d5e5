// AdamW on CUDA. Bound by memory. Bytes per element of a bf16 parameter with a bf16 gradient, read + written:
//
//     split master, fp32 moments     14 + 12      gradient 2, weight 2, low half 2, moments 8
//     split master, 8-bit moments     8 +  6      gradient 2, weight 2, low half 2, moments 2
//     fp32 master, fp32 moments      14 + 14      gradient 2, master 4, moments 8; and the weight written
//     fp32 parameter, 8-bit moments  10 +  6      gradient 4, parameter 4, moments 2
#include "base/launch_check.cuh"
#include "optim/adamw_block.h"
#include "optim/cuda_launch.cuh"

namespace torch_offload {
namespace {

__device__ const PackedLevels<7> device_first_levels;
__device__ const PackedLevels<8> device_second_levels;

/// Takes the numbers that are in device memory. False: nothing is to be done.
__device__ inline bool take_scaling(const DeviceScaling& scaling, GroupStep& step) {
    step.scaling = scaling.values;
    if (scaling.scale) step.scaling.scale = *scaling.scale;
    if (scaling.clip) step.scaling.clip = *scaling.clip;
    return !(scaling.found_inf && *scaling.found_inf == 1.0F);
}

__global__ void __launch_bounds__(kTeamLanes) wide_kernel(GroupStep step, DeviceScaling scaling) {
    if (!take_scaling(scaling, step)) return;
    const std::size_t lane = threadIdx.x;
    update_wide_groups(step, blockIdx.x * kTeamLanes + lane, gridDim.x * kTeamLanes);
}

__global__ void __launch_bounds__(kTeamLanes) packed_kernel(GroupStep step, DeviceScaling scaling) {
    __shared__ PackedShared shared;
    if (!take_scaling(scaling, step)) return;
    update_packed_blocks(CudaTeam{}, step, device_first_levels, device_second_levels, blockIdx.x, gridDim.x, shared);
}

GroupStep step_of(const AdamWArrays& arrays, const AdamWFactors& factors, const DeviceScaling& scaling) {
    const bool is_aligned =
        all_aligned({arrays.weights, arrays.low, arrays.masters, arrays.gradients, arrays.exp_avg, arrays.exp_avg_sq,
                     arrays.max_exp_avg_sq, arrays.packed_exp_avg, arrays.packed_exp_avg_sq});
    return {arrays, factors, scaling.values, is_aligned};
}

}  // namespace

void launch_adamw(const AdamWArrays& arrays, const AdamWFactors& factors, const DeviceScaling& scaling,
                  cudaStream_t stream) {
    if (arrays.count == 0) return;
    const bool is_packed = arrays.packed_exp_avg != nullptr;
    const auto kernel = is_packed ? &packed_kernel : &wide_kernel;
    const std::size_t piece = kTeamLanes * kGroup;  // of a block, in both
    const unsigned blocks = blocks_for(kernel, kTeamLanes, (arrays.count + piece - 1) / piece);
    kernel<<<blocks, kTeamLanes, 0, stream>>>(step_of(arrays, factors, scaling), scaling);
    check_cuda(cudaGetLastError(), "launching AdamW");
}

}  // namespace torch_offload
