// Kernels for CUDA: AdamW and the writeback of gradients on arrays in device memory, queued on a stream. Layer optim,
// without torch; for sources of the CUDA build only.
#pragma once

#include <cuda_runtime_api.h>

#include "optim/adamw_kernels.h"
#include "optim/writeback.h"

namespace torch_offload {

/// The three numbers that a step may take from tensors. Pointers are to device memory and stand in for the values:
/// they are read when the kernel runs, so that no host waits for them.
struct DeviceScaling {
    GradientScaling values;
    const float* scale = nullptr;      // [1], or nullptr
    const float* clip = nullptr;       // [1], or nullptr
    const float* found_inf = nullptr;  // [1], or nullptr; at 1 everything stays as it is
};

/// The same numbers as adamw_update on the same arrays, bit for bit.
/// Pre:    all pointers of `arrays` are to memory of the current device, valid until the stream comes by.
/// Throws: OffloadError if the launch is refused.
void launch_adamw(const AdamWArrays& arrays, const AdamWFactors& factors, const DeviceScaling& scaling,
                  cudaStream_t stream);

/// The same bytes and sums as write_back_gradients and total_writeback, bit for bit, for any number of blocks.
/// `sums`: [writeback_chunks(count)], `total`: [1], both in device memory. `block_count` 0: as many as the device
/// holds. Throws: OffloadError if a launch is refused.
void launch_writeback(const WritebackArrays& arrays, WritebackSum* sums, WritebackSum* total, unsigned block_count,
                      cudaStream_t stream);

}  // namespace torch_offload
