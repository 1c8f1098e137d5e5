// Gradients that the backward itself uses up: each is applied by its parameter's optimizer as soon as it is complete,
// and has no bytes afterwards. Layer autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "autograd/paged_storage.h"

namespace torch_offload {

/// As gradient_complete() of `parameter.grad`, whose pages stay in memory from then on while the guard lives: what is
/// recorded with them is applied at once, and nobody writes them to disk before that. Notes that the parameter's
/// `states` are used from now on, until gradient_applied(). Nothing if the gradient has no pages.
/// Throws: what a pin throws.
std::optional<PinGuard> hold_for_update(const at::Tensor& parameter, const std::vector<at::Tensor>& states);

/// `parameter.grad` has been applied: it becomes a tensor of the same shape without bytes, which knows its norm. Every
/// other access is an OffloadError, but for one that overwrites all of it. What has the tensor that it was keeps it.
/// Pre:    hold_for_update() found pages of the gradient.
/// Throws: what a pin throws, for work recorded for the parameter; the gradient is then as it was.
void gradient_applied(const at::Tensor& parameter, const std::vector<at::Tensor>& states);

bool is_applied(const at::Tensor& tensor) noexcept;

/// Throws: OffloadError if the block is that of an applied gradient.
void check_has_bytes(const Block& block);

/// Of a call of a list operator that writes, before it runs: multiplying an applied gradient by one changes no bit, and
/// is taken out of the call; zeros give it bytes again. True if nothing is left: the arguments are dropped.
/// Throws: OffloadError for any other call with an applied gradient.
bool leave_out_applied(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace torch_offload
