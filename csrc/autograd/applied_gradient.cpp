#include "autograd/applied_gradient.h"

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "autograd/deferred_ops.h"
#include "autograd/engine.h"
#include "autograd/gradient_hook.h"
#include "autograd/managed_arguments.h"
#include "base/check.h"

namespace torch_offload {
namespace {

/// The block of the parameter's gradient, or nullptr if that has no pages.
Block* block_of_gradient(const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    return gradient.defined() && segment_of(parameter) ? block_of(gradient) : nullptr;
}

std::string why_without_bytes(const Segment& segment) {
    return concat("the ", segment.label,
                  " was applied during the backward, since update=\"backward\" is set: it has no bytes that could be "
                  "read, scaled or added to. Clip nothing (max_grad_norm=0), take one backward per step and leave "
                  "gradients alone, or leave the setting update out");
}

/// Makes pages without bytes lost, for accesses behind the dispatcher as well, or, without `error`, zeros again.
/// Pre: they are one or the other, and nobody waits for them.
void set_lost(Segment& segment, const std::exception_ptr& error) {
    for (std::size_t index = 0; index < segment.page_count(); ++index) {
        Page& page = segment.page(index);
        PageWord seen = page.load();
        const bool is_without_bytes = seen.state() == PageState::zero || seen.state() == PageState::failed;
        if (!is_without_bytes || !page.change(seen, seen.with(PageState::busy))) continue;
        page.error = error;
        page.enter(error ? PageState::failed : PageState::zero);
    }
}

/// The same norm, of a tensor that has never been written to.
std::shared_ptr<const GradientNorm> norm_of_new(const std::shared_ptr<const GradientNorm>& norm,
                                                const at::Tensor& tensor) {
    if (!norm) return nullptr;
    auto copy = std::make_shared<GradientNorm>(*norm);
    copy->tensor_version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
    copy->write_count = 0;
    return copy;
}

void note_use(Engine& engine, const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
        if (const std::shared_ptr<Segment>& segment = segment_of(tensor)) engine.pager().touch(segment);
    }
}

/// All of them were in use until here: between two uses, the second of which is near, nothing of them leaves memory.
/// The gradient is left to its last owner, and written by nobody until then.
void note_end_of_update(Engine& engine, const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
    const std::shared_ptr<Segment>& gradient = segment_of(parameter.grad());
    gradient->keep_for_next_use();
    note_use(engine, states);
    note_use(engine, {parameter.grad(), parameter});
}

bool has_applied(c10::ArrayRef<c10::IValue> arguments) {
    bool found = false;
    for_each_tensor(arguments, [&](std::size_t, const at::Tensor& tensor) { found = found || is_applied(tensor); });
    return found;
}

bool is_one(const c10::IValue& factor) {
    if (factor.isScalar()) return factor.toScalar().equal(1);
    if (!factor.isTensor()) return false;
    const at::Tensor& tensor = factor.toTensor();
    return tensor.defined() && tensor.dim() == 0 && !block_of(tensor) && tensor.item().equal(1);
}

/// Without the elements that are applied gradients.
c10::List<at::Tensor> with_bytes(const c10::IValue& list) {
    c10::List<at::Tensor> kept;
    for (const c10::IValue& element : list.toListRef()) {
        if (!is_applied(element.toTensor())) kept.push_back(element.toTensor());
    }
    return kept;
}

}  // namespace

std::optional<PinGuard> hold_for_update(const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
    gradient_complete(parameter, parameter.grad(), true);
    Block* const block = block_of_gradient(parameter);
    if (!block) return std::nullopt;
    const PinRequest request{block->segment, Access::read};
    PinGuard guard = block->engine->pin({&request, 1});
    guard.keep();
    block->segment->end_next_use();
    note_use(*block->engine, states);
    return guard;
}

void gradient_applied(const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
    Block* const block = block_of_gradient(parameter);
    OFFLOAD_CHECK(block != nullptr, InvalidArgument, "the parameter has no gradient in pages");
    const std::shared_ptr<Engine> engine = block->engine;
    engine->deferred().force(block->segment);
    engine->deferred().force(segment_of(parameter));
    note_end_of_update(*engine, parameter, states);
    const at::Tensor gradient = parameter.grad();
    const at::Tensor applied = make_zero_tensor(engine, gradient, gradient.scalar_type(), c10::MemoryFormat::Preserve,
                                                role_of(*block->segment));
    Block& kept = *block_of(applied);
    kept.norm.store(norm_of_new(block->norm.load(), applied));
    set_lost(*kept.segment, exception_from([&] { return OffloadError(why_without_bytes(*kept.segment)); }));
    kept.is_applied.store(true);
    parameter.mutable_grad() = applied;
    engine->counters.gradients_applied.increment();
}

bool is_applied(const at::Tensor& tensor) noexcept {
    const Block* block = block_of(tensor);
    return block && block->is_applied.load(std::memory_order_relaxed);
}

void check_has_bytes(const Block& block) {
    OFFLOAD_CHECK(!block.is_applied.load(std::memory_order_relaxed), OffloadError, why_without_bytes(*block.segment));
}

bool leave_out_applied(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::size_t count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments = torch::jit::last(*stack, count);
    if (!has_applied(arguments)) return false;
    const std::string_view name = op.operator_name().name;
    if (name == "aten::_foreach_zero_") {
        for_each_tensor(arguments, [](std::size_t, const at::Tensor& tensor) {
            Block* const block = block_of(tensor);
            if (block && block->is_applied.exchange(false)) set_lost(*block->segment, nullptr);
        });
        return false;
    }
    if (name != "aten::_foreach_mul_" || !is_one(arguments[1])) {
        for_each_tensor(arguments, [](std::size_t, const at::Tensor& tensor) {
            if (const Block* block = block_of(tensor)) check_has_bytes(*block);
        });
        return false;
    }
    c10::List<at::Tensor> kept = with_bytes(arguments[0]);
    if (kept.empty()) {
        torch::jit::drop(*stack, count);
        return true;
    }
    *(stack->end() - static_cast<std::ptrdiff_t>(count)) = std::move(kept);
    return false;
}

}  // namespace torch_offload
