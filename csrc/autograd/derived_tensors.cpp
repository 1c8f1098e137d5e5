#include "autograd/derived_tensors.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "autograd/managed_arguments.h"

namespace torch_offload {
namespace {

const char* label_of(Engine::Derived derived) {
    return derived == Engine::Derived::temporary ? "optimizer temporary" : "optimizer state";
}

SegmentRole derived_role(Engine& engine, const Segment& source, Engine::Derived derived) {
    const TraceId parameter = parameter_role_of(source);
    const SegmentKind kind = derived == Engine::Derived::temporary ? SegmentKind::other : SegmentKind::state;
    return {kind, label_of(derived), engine.derived_role(parameter, derived), parameter};
}

/// An argument by its name, or nullptr where the operator has none of that name or it is None.
const c10::IValue* given(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, std::string_view name) {
    const auto& declared = op.schema().arguments();
    for (std::size_t i = 0; i < declared.size(); ++i) {
        if (declared[i].name() == name) return arguments[i].isNone() ? nullptr : &arguments[i];
    }
    return nullptr;
}

bool has_usual_options(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, c10::Device torch_device) {
    const c10::IValue* layout = given(op, arguments, "layout");
    const c10::IValue* device = given(op, arguments, "device");
    const c10::IValue* pin_memory = given(op, arguments, "pin_memory");
    return (!layout || layout->toLayout() == c10::kStrided) && (!device || device->toDevice() == torch_device) &&
           (!pin_memory || !pin_memory->toBool());
}

/// Only +0.0 is all zero bits.
bool fills_with_zero_bits(const c10::IValue& value) {
    if (value.isInt()) return value.toInt() == 0;
    return value.isDouble() && value.toDouble() == 0 && !std::signbit(value.toDouble());
}

}  // namespace

TraceId parameter_role_of(const Segment& segment) noexcept {
    return segment.kind() == SegmentKind::parameter ? segment.trace_id : segment.anchor_id.load();
}

void manage_derived(const std::shared_ptr<Engine>& engine, const at::Tensor& result, const Segment& source,
                    Engine::Derived derived) {
    if (!result.defined() || result.nbytes() < std::max(engine->min_paged_bytes(), kMinDerivedBytes)) return;
    if (block_of(result) || !is_manageable(*engine, result)) return;
    manage(engine, result, derived_role(*engine, source, derived));
}

const Block* derivation_source(c10::DispatchKeySet keys, const c10::IValue& argument) {
    if (!argument.isTensor()) return nullptr;
    const Block* block = block_of(argument.toTensor());
    // With gradients enabled it is the closure of a step, which runs the model.
    const bool derives = block && block->engine->in_optimizer_step() && is_plain_call(keys) &&
                         !c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
    return derives ? block : nullptr;
}

bool try_make_zeros(const c10::OperatorHandle& op, const OperatorTraits& traits, torch::jit::Stack* stack) {
    const std::size_t count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments = torch::jit::last(*stack, count);
    const bool is_zero =
        traits.likeness == Likeness::zeros || (traits.likeness == Likeness::full && fills_with_zero_bits(arguments[1]));
    if (!is_zero || !has_usual_options(op, arguments, arguments[0].toTensor().device())) return false;
    const at::Tensor like = arguments[0].toTensor();
    const c10::IValue* dtype = given(op, arguments, "dtype");
    const c10::ScalarType type = dtype ? dtype->toScalarType() : like.scalar_type();
    const c10::IValue* memory_format = given(op, arguments, "memory_format");
    const c10::MemoryFormat format = memory_format ? memory_format->toMemoryFormat() : c10::MemoryFormat::Preserve;
    const bool is_usual_format = format == c10::MemoryFormat::Preserve || format == c10::MemoryFormat::Contiguous;

    const Block& block = *block_of(like);
    const std::shared_ptr<Engine> engine = block.engine;
    const std::size_t size_bytes = static_cast<std::size_t>(like.numel()) * c10::elementSize(type);
    if (!is_usual_format || c10::isQIntType(type) ||
        size_bytes < std::max(engine->min_paged_bytes(), kMinDerivedBytes)) {
        return false;
    }
    SegmentRole role = derived_role(*engine, *block.segment, Engine::Derived::state);
    at::Tensor zeros = make_zero_tensor(engine, like, type, format, std::move(role));
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(zeros));
    return true;
}

}  // namespace torch_offload
