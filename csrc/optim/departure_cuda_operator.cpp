// torch_offload::depart_gradient for a gradient on a GPU. CUDA build only.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "optim/cuda_launch.cuh"
#include "optim/departure_operator.h"

namespace torch_offload {

std::tuple<at::Tensor, at::Tensor> depart_gradient_cuda(const at::Tensor& gradient,
                                                        const std::optional<at::Tensor>& to) {
    const c10::cuda::CUDAGuard guard(gradient.device());
    const DepartureArrays arrays = checked_departure(gradient, to);
    const at::Tensor sums = departure_sums(gradient, departure_chunks(arrays.count) + 1);
    auto* const total = static_cast<DepartureSum*>(sums.mutable_data_ptr());
    launch_departure(arrays, total + 1, total, 0, c10::cuda::getCurrentCUDAStream());
    return departure_numbers(sums);
}

}  // namespace torch_offload
