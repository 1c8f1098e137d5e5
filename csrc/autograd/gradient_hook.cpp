#include "autograd/gradient_hook.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_norm.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "autograd/storage_uses.h"

namespace torch_offload {
namespace {

/// A mode would see an operator that the script never called.
bool is_watched() { return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python); }

void keep_norm(Engine& engine, const at::Tensor& gradient, Block& block) {
    block.norm.store(nullptr);
    if (!engine.wants_norms() || gradient.requires_grad() || at::in_parallel_region() || is_watched()) return;
    const std::uint64_t write_count = block.write_count.load();
    const PinRequest request{block.segment, Access::read};
    const PinGuard guard = engine.pin({&request, 1});
    OpenStorages open;
    open.open(gradient);
    // Past the fallback, which would take this for the script asking for norms.
    const c10::impl::ExcludeDispatchKeyGuard below_fallback(kPagedKeys);
    const c10::NoGradGuard no_grad;
    auto norm = std::make_shared<GradientNorm>();
    norm->value = at::_foreach_norm({gradient}, 2).front();
    norm->dtype = gradient.scalar_type();
    norm->sizes = gradient.sizes().vec();
    norm->strides = gradient.strides().vec();
    norm->tensor_version = gradient.unsafeGetTensorImpl()->version_counter().current_version();
    norm->write_count = write_count;
    norm->thread_count = at::get_num_threads();
    block.norm.store(std::move(norm));
}

/// Other tensors may lie in the same storage: of another dtype, say.
bool looks_as_then(const at::Tensor& gradient, const GradientNorm& norm) {
    return gradient.scalar_type() == norm.dtype && gradient.sizes() == norm.sizes && gradient.strides() == norm.strides;
}

bool becomes_pages(const Engine& engine, const at::Tensor& gradient) {
    return is_manageable(engine, gradient) && covers_storage(gradient) && gradient.nbytes() >= engine.min_paged_bytes();
}

}  // namespace

void gradient_complete(const at::Tensor& parameter, const at::Tensor& gradient, bool is_used_next) {
    const Block* parameter_block = block_of(parameter);
    if (!parameter_block || !gradient.defined()) return;
    const std::shared_ptr<Engine> engine = parameter_block->engine;
    if (!block_of(gradient)) {
        if (!becomes_pages(*engine, gradient)) return;
        const Segment& owner = *parameter_block->segment;
        manage(engine, gradient,
               {SegmentKind::gradient, "gradient of " + owner.label,
                engine->derived_role(owner.trace_id, Engine::Derived::gradient), owner.trace_id, is_used_next});
    }
    add_paged_keys(gradient);
    Block& block = *block_of(gradient);
    engine->pager().touch(block.segment);
    if (covers_storage(gradient)) keep_norm(*engine, gradient, block);
}

void gradient_replaced(const at::Tensor& tensor) {
    Block* block = block_of(tensor);
    if (!block || block->segment->kind() != SegmentKind::gradient || block->engine->in_optimizer_step()) return;
    keep_norm(*block->engine, tensor, *block);
}

std::optional<at::Tensor> kept_norm(const at::Tensor& gradient) {
    const Block* block = block_of(gradient);
    if (!block || block->is_raw_exposed.load() || gradient.is_inference()) return std::nullopt;
    const std::shared_ptr<const GradientNorm> norm = block->norm.load();
    if (!norm || norm->write_count != block->write_count.load() || at::in_parallel_region() ||
        norm->thread_count != at::get_num_threads() || !covers_storage(gradient) || !looks_as_then(gradient, *norm) ||
        norm->tensor_version != gradient.unsafeGetTensorImpl()->version_counter().current_version()) {
        return std::nullopt;
    }
    block->engine->counters.norms_from_cache.increment();
    return norm->value.clone();
}

}  // namespace torch_offload
