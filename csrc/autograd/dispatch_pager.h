// The boxed fallback on the key that managed tensors carry: pages in what an operator touches, runs it, lets go.
// Registered with torch by being linked in. Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_offload {

/// Called by the dispatcher for every operator that meets a tensor with kPagedKey, above autograd.
/// Throws: engine errors as Python exceptions where Python is there (error_bridge), else as they are.
void page_in_and_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torch_offload
