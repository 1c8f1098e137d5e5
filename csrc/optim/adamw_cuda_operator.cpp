// torch_offload::fused_adamw_ for tensors on a GPU. CUDA build only.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

#include "optim/adamw_operator.h"
#include "optim/cuda_launch.cuh"

namespace torch_offload {
namespace {

/// A number that a kernel reads on the GPU, or nullptr where the host has it.
const float* on_device(const char* name, const std::optional<at::Tensor>& number, at::Device device) {
    if (!number || number->is_cpu()) return nullptr;
    TORCH_CHECK_VALUE(number->device() == device && number->scalar_type() == at::kFloat && number->numel() == 1,
                      "fused_adamw_: ", name, " must be one float32 on ", device, " or the CPU, got ", number->numel(),
                      " of ", number->scalar_type(), " on ", number->device());
    return number->const_data_ptr<float>();
}

float on_host(const std::optional<at::Tensor>& number, float otherwise) {
    return number && number->is_cpu() ? number->item().toFloat() : otherwise;
}

DeviceScaling device_scaling(const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& found_inf,
                             const std::optional<at::Tensor>& clip, at::Device device) {
    DeviceScaling scaling;
    scaling.values = {scale.has_value(), clip.has_value(), on_host(scale, 1), on_host(clip, 1)};
    scaling.scale = on_device("grad_scale", scale, device);
    scaling.clip = on_device("clip_coefficient", clip, device);
    scaling.found_inf = on_device("found_inf", found_inf, device);
    return scaling;
}

}  // namespace

void fused_adamw_cuda(at::TensorList self, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                      at::TensorList max_exp_avg_sqs, at::TensorList masters, at::TensorList state_steps, double lr,
                      double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                      const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                      const std::optional<at::Tensor>& clip_coefficient) {
    if (self.empty()) return;
    const at::Device device = self[0].device();
    const c10::cuda::CUDAGuard guard(device);
    const std::vector<AdamWUpdate> updates =
        checked_updates({self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, state_steps, amsgrad},
                        {lr, beta1, beta2, eps, weight_decay, maximize}, device);
    if (on_host(found_inf, 0) == 1.0F) return;
    const DeviceScaling scaling = device_scaling(grad_scale, found_inf, clip_coefficient, device);
    for (const AdamWUpdate& update : updates) {
        launch_adamw(update.arrays, update.factors, scaling, c10::cuda::getCurrentCUDAStream());
    }
}

}  // namespace torch_offload
