// The operator torch_offload::fused_adamw_: AdamW over lists of tensors. Layer optim: may include torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "optim/adamw_kernels.h"

namespace torch_offload {

/// Takes lists like aten::_fused_adamw_, and `masters`: per parameter the low half of its master (int16,
/// split_master.h) or the whole of it (float32); empty where the parameters are float32 and their own masters.
/// `clip_coefficient` scales gradients as an in-place multiplication would, which rounds to their dtype; unlike in
/// torch's operator gradients are only read. A `found_inf` of 1 leaves everything as it is.
inline constexpr const char* kFusedAdamWSchema =
    "fused_adamw_(Tensor(a!)[] self, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor[] state_steps, *, float lr, float beta1, float beta2, "
    "float weight_decay, float eps, bool amsgrad, bool maximize, Tensor? grad_scale=None, Tensor? found_inf=None, "
    "Tensor? clip_coefficient=None) -> ()";

/// Its kernel for the CPU. fused_adamw_cuda is there in the CUDA build only; scales, coefficient and `found_inf` that
/// are on the GPU are read there, step counts on the GPU are waited for. Pre:    each parameter is dense, and its
/// states have its strides. Throws: c10::Error for anything else, for other dtypes or devices and for lists of
/// different lengths, before the
///         first element is changed.
using FusedAdamW = void(at::TensorList self, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                        at::TensorList max_exp_avg_sqs, at::TensorList masters, at::TensorList state_steps, double lr,
                        double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                        const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                        const std::optional<at::Tensor>& clip_coefficient);
FusedAdamW fused_adamw;
FusedAdamW fused_adamw_cuda;

/// The lists of a call.
struct AdamWLists {
    at::TensorList self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, state_steps;
    bool is_amsgrad = false;
};

/// What a kernel does for one parameter. `gradient` is a copy where the one given lies otherwise than its parameter.
struct AdamWUpdate {
    AdamWArrays arrays;
    AdamWFactors factors;
    at::Tensor gradient;
};

/// All of them, each checked. Every tensor is on `device`.
std::vector<AdamWUpdate> checked_updates(const AdamWLists& lists, const AdamWOptions& options, at::Device device);

/// torch.ops.torch_offload.pack_moment: a float32 tensor as a packed one, elements in memory order.
inline constexpr const char* kPackMomentSchema = "pack_moment(Tensor values, bool is_second) -> Tensor";
at::Tensor packed_moment(const at::Tensor& values, bool is_second);

/// torch.ops.torch_offload.unpack_moment: the float32 values of a packed tensor, shaped like `like`.
inline constexpr const char* kUnpackMomentSchema =
    "unpack_moment(Tensor packed, Tensor like, bool is_second) -> Tensor";
at::Tensor unpacked_moment(const at::Tensor& packed, const at::Tensor& like, bool is_second);

}  // namespace torch_offload
