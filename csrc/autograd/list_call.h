// List operators over managed tensors: recorded, answered from kept norms, or run in chunks that fit. Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "autograd/operator_table.h"

namespace torch_offload {

/// Runs a call whose traits say `list` or `list_norm`. Results equal those of one call on the whole lists, bit for
/// bit: the operators work element by element.
void call_list(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
               torch::jit::Stack* stack);

}  // namespace torch_offload
