// When an operator surely writes all of its first argument, so that what was there need not be read. Layer autograd.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>

#include "autograd/operator_table.h"

namespace torch_offload {

/// True if the call will write every byte of its first argument's storage without reading any, and cannot fail on its
/// arguments once it runs: what is not read back would otherwise be lost when it fails.
bool overwrites_storage(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments, c10::DispatchKeySet keys);

}  // namespace torch_offload
