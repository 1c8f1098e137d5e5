// Rounding with error feedback as torch operators, for the compressor. Layer autograd: may include torch.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_offload {

/// Rounds to -1, 0 and +1 times a column's step, errors fed back (codec/error_feedback.h): values, as `exact`.
/// `exact`: [matrices, columns, rows]. `factor`: [matrices, columns, columns], upper Cholesky factor of the inverse of
/// the second moment. `step`, `threshold`: [matrices, columns].
inline constexpr const char* kRoundWithFeedbackSchema =
    "round_with_feedback(Tensor exact, Tensor factor, Tensor step, Tensor threshold) -> Tensor";
/// Gives each of these values another choice, given all others: new values. `moment`: [matrices, columns, columns].
inline constexpr const char* kChooseAgainSchema =
    "refine(Tensor exact, Tensor values, Tensor moment, Tensor step, Tensor threshold) -> Tensor";

/// Kernels for the CPU; all tensors are float32. Memory: that of the result.
/// Throws: c10::Error for a type or a shape that does not fit.
/// Threads: any. They share torch's pool, some rows at a time; results do not depend on how many there are.
at::Tensor round_with_feedback(const at::Tensor& exact, const at::Tensor& factor, const at::Tensor& step,
                               const at::Tensor& threshold);
at::Tensor refine_values(const at::Tensor& exact, const at::Tensor& values, const at::Tensor& moment,
                         const at::Tensor& step, const at::Tensor& threshold);

}  // namespace torch_offload
