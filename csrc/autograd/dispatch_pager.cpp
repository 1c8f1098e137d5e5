// The boxed fallback on the keys that managed tensors carry: pages in what an operator touches, runs it, lets go.
// The dispatcher calls it for every operator that meets such a tensor: above autograd, or, where a tensor subclass
// written in Python calls the operator on its parts, below.
#include "autograd/dispatch_pager.h"

#include <torch/library.h>

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/derived_tensors.h"
#include "autograd/error_bridge.h"
#include "autograd/gradient_buckets.h"
#include "autograd/gradient_hook.h"
#include "autograd/list_call.h"
#include "autograd/managed_arguments.h"
#include "autograd/operator_table.h"
#include "autograd/register_allocator.h"
#include "autograd/row_lookup.h"

namespace torch_offload {
namespace {

constexpr c10::DispatchKey kListsKey = c10::DispatchKey::BackendSelect;  // of every call

c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    return torch::jit::last(*stack, op.schema().arguments().size());
}

void call_pinned(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
    ManagedArguments managed(traits, arguments_of(op, stack), keys);
    if (managed.empty()) {
        managed.open();
        op.redispatchBoxed(keys_below(keys), stack);
        return;
    }
    managed.pin();
    {
        std::optional<AllocatorBypass> bypass;
        if (managed.must_succeed()) bypass.emplace();
        call_kernel(op, traits, keys, stack);
    }
    managed.manage_replaced();
    if (traits.overwrite == Overwrite::copy && managed.must_succeed()) gradient_replaced(stack->back().toTensor());
    if (traits.is_collective) managed.hold_for(torch::jit::last(*stack, op.schema().returns().size()));
}

/// What was managed stays managed: an unmanaged `source` whose storage `self` is given becomes pages in the same role.
void manage_in_place_of(const at::Tensor& self, const at::Tensor& source) {
    const Block* block = block_of(self);
    if (!block || block_of(source)) return;
    const std::shared_ptr<Engine> engine = block->engine;
    engine->try_manage(source, role_of(*block->segment));
}

/// `p.data = x` in TorchScript; it takes over x's storage and key set.
void call_set_data(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::ArrayRef<c10::IValue> arguments = arguments_of(op, stack);
    const at::Tensor self = arguments[0].toTensor();
    manage_in_place_of(self, arguments[1].toTensor());
    op.redispatchBoxed(keys_below(keys), stack);
    if (block_of(self)) add_paged_keys(self);
}

/// `p.data = x` from Python and `Module._apply` reach the dispatcher with this question only, just before the copy.
void call_data_query(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::ArrayRef<c10::IValue> arguments = arguments_of(op, stack);
    const at::Tensor self = arguments[0].toTensor();
    const at::Tensor source = arguments[1].toTensor();
    op.redispatchBoxed(keys_below(keys), stack);
    if (stack->back().toBool()) manage_in_place_of(self, source);
}

/// The storage bytes that `resize_` to these sizes needs.
std::size_t bytes_after_resize(const at::Tensor& self, const c10::IValue& sizes) {
    std::size_t elements = 1;
    for (const c10::IValue& size : sizes.toListRef()) {
        elements *= static_cast<std::size_t>(size.isInt() ? size.toInt() : 0);
    }
    return (static_cast<std::size_t>(self.storage_offset()) + elements) * static_cast<std::size_t>(self.element_size());
}

/// A storage that grows is copied to new memory by torch; one that does not is left alone.
void call_resize(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
    const c10::ArrayRef<c10::IValue> arguments = arguments_of(op, stack);
    const at::Tensor& self = arguments[0].toTensor();
    if (self.has_storage() && bytes_after_resize(self, arguments[1]) > self.storage().nbytes()) {
        call_pinned(op, traits, keys, stack);
    } else {
        op.redispatchBoxed(keys_below(keys), stack);
    }
}

bool goes_to_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    for (const c10::IValue& argument : arguments_of(op, stack)) {
        if (argument.isDevice() && argument.toDevice().is_meta()) return true;
    }
    return false;
}

/// An operator on a managed tensor inside an optimizer step. What it makes may be a state (`zeros_like`, `clone`) or
/// become one (SGD clones the decayed gradient), so it is managed from the start.
void call_deriving(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                   const Block& source, torch::jit::Stack* stack) {
    if (traits.likeness != Likeness::none && try_make_zeros(op, traits, stack)) return;
    const std::shared_ptr<Engine> engine = source.engine;
    const std::shared_ptr<Segment> segment = source.segment;
    if (traits.kind == OperatorKind::passing) {
        op.redispatchBoxed(keys_below(keys), stack);
    } else {
        call_pinned(op, traits, keys, stack);
    }
    if (op.schema().returns().size() != 1 || !stack->back().isTensor()) return;
    const Engine::Derived derived =
        traits.likeness != Likeness::none ? Engine::Derived::copy : Engine::Derived::temporary;
    manage_derived(engine, stack->back().toTensor(), *segment, derived);
}

void call(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
          torch::jit::Stack* stack) {
    if (traits.likeness != Likeness::none || traits.kind == OperatorKind::ordinary) {
        const c10::ArrayRef<c10::IValue> arguments = arguments_of(op, stack);
        const Block* source = arguments.empty() ? nullptr : derivation_source(keys, arguments[0]);
        if (source) {
            call_deriving(op, traits, keys, *source, stack);
            return;
        }
    }
    switch (traits.kind) {
        case OperatorKind::passing:
            op.redispatchBoxed(keys_below(keys), stack);
            return;
        case OperatorKind::counting:
        case OperatorKind::ordinary:
            call_pinned(op, traits, keys, stack);
            return;
        case OperatorKind::casting:
            if (goes_to_meta(op, stack)) {
                op.redispatchBoxed(keys_below(keys), stack);
            } else {
                call_pinned(op, traits, keys, stack);
            }
            return;
        case OperatorKind::row_lookup:
        case OperatorKind::row_select:
            if (!try_look_up_rows(op, traits, keys, stack)) call_pinned(op, traits, keys, stack);
            return;
        case OperatorKind::row_sum:
            if (!try_sum_rows(op, traits, keys, stack)) call_pinned(op, traits, keys, stack);
            return;
        case OperatorKind::list:
        case OperatorKind::list_norm:
            call_list(op, traits, keys, stack);
            return;
        case OperatorKind::set_data:
            call_set_data(op, keys, stack);
            return;
        case OperatorKind::data_query:
            call_data_query(op, keys, stack);
            return;
        case OperatorKind::resizing:
            call_resize(op, traits, keys, stack);
            return;
    }
}

/// Engine errors leave as Python exceptions where Python is there, else as they are.
void page_in_and_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const OperatorTraits& traits = traits_of(op);
    if (BucketScope* const scope = BucketScope::current(); scope && traits.name.name == "aten::empty") {
        across_torch([&] { scope->make(op, keys_below(keys), stack); });
        return;
    }
    const bool is_shape_only = keys.has_backend(c10::BackendComponent::MetaBit);
    if (is_shape_only || (traits.kind == OperatorKind::passing && traits.likeness == Likeness::none)) {
        op.redispatchBoxed(keys_below(keys), stack);
        return;
    }
    across_torch([&] { call(op, traits, keys, stack); });
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&page_in_and_call>()); }

TORCH_LIBRARY_IMPL(_, CustomRNGKeyId, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&page_in_and_call>()); }

/// The dispatcher does not look into lists of lists, in which collectives take tensors: a call that has managed ones
/// nowhere else comes here, as every call does, and not by their keys.
void page_in_lists_and_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    bool has_key = false;  // the fallback has been here
    bool is_managed = false;
    for (const c10::IValue& argument : arguments_of(op, stack)) {
        const bool is_nested = argument.isList() && !argument.isTensorList();
        for_each_tensor_in(argument, [&](const at::Tensor& tensor) {
            (is_nested ? is_managed : has_key) |= block_of(tensor) != nullptr;
        });
    }
    const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kListsKey);
    if (has_key || !is_managed) {
        op.redispatchBoxed(below, stack);
    } else {
        page_in_and_call(op, below, stack);
    }
}

TORCH_LIBRARY_IMPL(c10d, BackendSelect, m) {
    for (const char* name : {"allgather_", "allgather_coalesced_", "gather_", "reduce_scatter_", "scatter_"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&page_in_lists_and_call>());
    }
}

/// Whether torch takes a composite kernel for the key's. One that autograd sees through is left alone, since it only
/// calls operators that arrive here, unless the operator has a kernel for a device, which is to run there instead.
bool hides_fallback(const c10::OperatorHandle& op) {
    const auto has = [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); };
    if (!op.hasSchema() || has(kNestedKey)) return false;
    return has(c10::DispatchKey::CompositeExplicitAutograd) ||
           has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
           (has(c10::DispatchKey::CompositeImplicitAutograd) &&
            (has(c10::DispatchKey::CPU) || has(c10::DispatchKey::CUDA)));
}

}  // namespace

void cover_composite_operators() {
    static std::mutex mutex;
    static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>;  // for as long as the process
    const std::lock_guard lock(mutex);
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        const std::optional<c10::OperatorHandle> op = dispatcher.findOp(name);
        if (!op || !hides_fallback(*op)) continue;
        registrations->push_back(
            dispatcher.registerImpl(name, kNestedKey, c10::KernelFunction::makeFromBoxedFunction<&page_in_and_call>(),
                                    std::nullopt, nullptr, "torch_offload's fallback"));
    }
}

}  // namespace torch_offload
