// torch_offload::write_back_gradient for a gradient on a GPU. CUDA build only.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "optim/cuda_launch.cuh"
#include "optim/writeback_operator.h"

namespace torch_offload {

std::tuple<at::Tensor, at::Tensor> write_back_gradient_cuda(const at::Tensor& gradient,
                                                            const std::optional<at::Tensor>& to) {
    const c10::cuda::CUDAGuard guard(gradient.device());
    const WritebackArrays arrays = checked_writeback(gradient, to);
    const at::Tensor sums = writeback_sums(gradient, writeback_chunks(arrays.count) + 1);
    auto* const total = static_cast<WritebackSum*>(sums.mutable_data_ptr());
    launch_writeback(arrays, total + 1, total, 0, c10::cuda::getCurrentCUDAStream());
    return writeback_numbers(sums);
}

}  // namespace torch_offload
