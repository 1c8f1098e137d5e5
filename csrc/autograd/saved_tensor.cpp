#include "autograd/saved_tensor.h"

#include <ATen/SavedTensorHooks.h>

#include "autograd/paged_storage.h"

namespace torch_offload {
namespace {

std::uint32_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

bool becomes_pages(Engine& engine, const at::Tensor& tensor) {
    if (!tensor.is_floating_point() || !is_manageable(engine, tensor) || tensor.nbytes() < engine.min_paged_bytes()) {
        return false;
    }
    if (engine.kept_out().contains(*tensor.storage().unsafeGetStorageImpl())) return false;
    return engine.torch_device().is_cpu() ? is_adoptable(engine, tensor) : is_allocated(tensor);
}

/// The operator that saves the tensor may be about to read it, as may others that look at its storage: on a GPU that
/// stays as it is. Its bytes are those of this moment in the order of the stream.
SavedTensor saved_copy(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor) {
    const std::uint32_t version = version_of(tensor);
    c10::Storage copy = engine->saved_copies().find(tensor.storage(), version);
    if (!copy) {
        const TraceId role = engine->derived_role(kNoTrace, Engine::Derived::activation);
        copy = copy_into_pages(engine, tensor, {SegmentKind::activation, "activation", role, kNoTrace});
        engine->saved_copies().add(tensor.storage(), version, copy);
        engine->counters.saved_bytes.add(tensor.nbytes());
    }
    return {look_alike(tensor, std::move(copy)), version};
}

}  // namespace

bool may_hook_saved_tensors() {
    return at::SavedTensorDefaultHooks::is_enabled() && !at::SavedTensorDefaultHooks::get_hooks();
}

std::size_t saved_tensor_hook_count() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

SavedTensor save_for_backward(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor) {
    SavedTensor saved{tensor.detach(), version_of(tensor)};
    if (!block_of(tensor)) {
        if (!becomes_pages(*engine, tensor)) return saved;
        if (!engine->torch_device().is_cpu()) return saved_copy(engine, tensor);
        const TraceId role = engine->derived_role(kNoTrace, Engine::Derived::activation);
        manage(engine, tensor, {SegmentKind::activation, "activation", role, kNoTrace});
        engine->counters.saved_bytes.add(tensor.nbytes());
        engine->keep_for_a_while(segment_of(tensor));
    }
    // Who uses it from here on pins it, the operator that is being recorded aside.
    add_paged_keys(tensor);
    add_paged_keys(saved.tensor);
    return saved;
}

at::Tensor restore_for_backward(const SavedTensor& saved) {
    const std::uint32_t version = version_of(saved.tensor);
    TORCH_CHECK(version == saved.version,
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                saved.tensor.toString(), " ", saved.tensor.sizes(), "] is at version ", version, "; expected version ",
                saved.version, " instead.");
    return saved.tensor;
}

}  // namespace torch_offload
