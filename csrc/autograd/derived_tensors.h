// Tensors that an optimizer makes from managed ones inside its step: states and temporaries that become managed too.
// Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "autograd/engine.h"
#include "autograd/operator_table.h"
#include "base/units.h"

namespace torch_offload {

/// Results smaller than this stay ordinary, whatever the engine's threshold is for parameters.
inline constexpr std::size_t kMinDerivedBytes = kSectorBytes;

/// The role of the parameter that a segment belongs to, in the recorded order of pins.
TraceId parameter_role_of(const Segment& segment) noexcept;

/// Makes `result`, just computed from `source`, a managed segment if it is large enough.
void manage_derived(const std::shared_ptr<Engine>& engine, const at::Tensor& result, const Segment& source,
                    Engine::Derived derived);

/// The argument's block if it is a managed tensor and the call comes from inside an optimizer step, where results may
/// be states that stay; else nullptr.
const Block* derivation_source(c10::DispatchKeySet keys, const c10::IValue& argument);

/// Replaces the arguments on the stack by a managed tensor of zeros that owns no bytes, if that is what the call
/// asks for with ordinary options. Pre: the operator has a likeness and derivation_source() is there.
bool try_make_zeros(const c10::OperatorHandle& op, const OperatorTraits& traits, torch::jit::Stack* stack);

}  // namespace torch_offload
