// The operator torch_offload::write_back_gradient. Layer optim: may include torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "optim/writeback.h"

namespace torch_offload {

/// Copies a gradient into `to`, cast to its dtype, and returns the sum of its squares (float64) and how many elements
/// are not finite (int64), both on the gradient's device: one pass over the memory, the same bits on every device.
inline constexpr const char* kDepartGradientSchema =
    "write_back_gradient(Tensor gradient, Tensor(a!)? to=None) -> (Tensor square_sum, Tensor nonfinite_count)";

/// Its kernel for the CPU; write_back_gradient_cuda is there in the CUDA build only and waits for nothing.
/// Pre:    bfloat16 or float32, dense; `to` has the device, sizes and strides of the gradient.
/// Throws: c10::Error for anything else.
using DepartGradient = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& gradient,
                                                          const std::optional<at::Tensor>& to);
DepartGradient write_back_gradient;
DepartGradient write_back_gradient_cuda;

/// The arrays of a call, checked.
WritebackArrays checked_writeback(const at::Tensor& gradient, const std::optional<at::Tensor>& to);

/// A tensor that holds `count` sums: [count, 2] of 8 bytes, the second int64.
at::Tensor writeback_sums(const at::Tensor& gradient, std::size_t count);
/// The two numbers of the first one.
std::tuple<at::Tensor, at::Tensor> writeback_numbers(const at::Tensor& sums);

}  // namespace torch_offload
