// Gradients that become pages as soon as they are complete, and their norms, kept while they are at hand. Layer
// autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "autograd/engine.h"

namespace torch_offload {

/// The 2-norm of a gradient, and what must not have changed for it to hold.
struct GradientNorm {
    at::Tensor value;  // 0-d
    c10::ScalarType dtype;
    std::vector<std::int64_t> sizes, strides;
    std::uint32_t tensor_version = 0;
    std::uint64_t write_count = 0;
    int thread_count = 0;  // the kernel's sum is cut by threads, so other counts give other bits
};

/// Makes the gradient of a parameter pages of the parameter's engine, without a copy where it lies in a temporary, and
/// keeps its norm. Does nothing for gradients that stay ordinary: sparse ones, small ones, those of unmanaged
/// parameters, an undefined one. With `is_used_next`, new pages stay in memory for their next use.
/// Threads: the one that runs the backward pass of this parameter.
void gradient_complete(const at::Tensor& parameter, const at::Tensor& gradient, bool is_used_next = false);

/// Keeps the norm of a gradient of pages that was just copied over, all of it: by what a reduction over ranks made,
/// say. Does nothing for other tensors, and inside an optimizer step. Pre: the caller has it pinned.
void gradient_replaced(const at::Tensor& tensor);

/// A fresh copy of the kept norm of `gradient`, if it still is what `_foreach_norm` would compute here and now.
std::optional<at::Tensor> kept_norm(const at::Tensor& gradient);

}  // namespace torch_offload
