// Operators over a table of which few rows are asked for: only their pages come in. Layer autograd.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include "autograd/operator_table.h"

namespace torch_offload {

/// Answers `embedding`, or `index_select` of rows, with copies of the rows, a few pages at a time, so that a table may
/// be larger than the budget. False, and nothing is done, where something else sees the call, the table trains or has
/// an update pending, is not on the host, or is small. An index that the table does not have is left to torch's kernel,
/// which raises. Threads: any. Throws what a pin throws.
bool try_look_up_rows(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack);

/// The same for `_embedding_bag`: torch's kernel is called with copies of the rows, once each, and indices into them.
/// False, too, for the largest elements of a bag, of which the result says in which rows they were.
bool try_sum_rows(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

}  // namespace torch_offload
