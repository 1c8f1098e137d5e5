#include "autograd/gradient_buckets.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "autograd/engine.h"

namespace torch_offload {
namespace {

thread_local BucketScope* current_scope = nullptr;

/// What `empty` would make on the host, without memory; nothing for another device.
std::optional<at::Tensor> shape_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    const std::optional<int> position = op.schema().argumentIndexWithName("device");
    if (!position) return std::nullopt;
    c10::IValue& device = stack[static_cast<std::size_t>(*position)];
    if (!device.isNone() && !device.toDevice().is_cpu()) return std::nullopt;
    device = c10::Device(c10::kMeta);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return stack.back().toTensor();
}

}  // namespace

at::Tensor GradientBuckets::make(const std::shared_ptr<Engine>& engine, const at::Tensor& like, bool is_home) {
    const TraceId role = engine->pager().new_trace_id();
    at::Tensor bucket = make_zero_tensor(
        engine, like, like.scalar_type(), c10::MemoryFormat::Preserve,
        {SegmentKind::gradient, "a bucket of gradients of DistributedDataParallel (bucket_cap_mb)", role, kNoTrace});
    const auto element_bytes = static_cast<std::size_t>(bucket.element_size());
    const std::lock_guard lock(mutex_);
    std::erase_if(buckets_, [](const Bucket& known) { return known.storage.expired(); });
    buckets_.push_back({bucket.storage().getWeakStorageImpl(), role, element_bytes, is_home});
    return bucket;
}

std::vector<GradientBuckets::Living> GradientBuckets::living() {
    std::vector<Living> found;
    const std::lock_guard lock(mutex_);
    for (const Bucket& bucket : buckets_) {
        if (c10::intrusive_ptr<c10::StorageImpl> storage = bucket.storage.lock()) {
            found.push_back({c10::Storage(std::move(storage)), bucket.element_bytes, bucket.is_home});
        }
    }
    return found;
}

bool GradientBuckets::has(TraceId role) {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(buckets_, [role](const Bucket& bucket) { return bucket.role == role; });
}

void GradientBuckets::forget() {
    for (const Living& bucket : living()) {
        const Block* block = block_of(*bucket.storage.unsafeGetStorageImpl());
        if (!block || bucket.is_home) continue;
        const std::shared_ptr<Engine> engine = block->engine;
        give_zeros(engine, bucket.storage, bucket.element_bytes, role_of(*block->segment));
    }
}

void GradientBuckets::release() {
    forget();
    for (const Living& bucket : living()) {
        if (block_of(*bucket.storage.unsafeGetStorageImpl())) unmanage(bytes_over(bucket.storage));
    }
}

BucketScope::BucketScope(std::shared_ptr<Engine> engine, bool is_home)
    : engine_(std::move(engine)), is_home_(is_home), outer_(current_scope), key_(kPagedKey) {
    current_scope = this;
}

BucketScope::~BucketScope() { current_scope = outer_; }

BucketScope* BucketScope::current() noexcept { return current_scope; }

void BucketScope::make(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const std::size_t count = op.schema().arguments().size();
    const std::optional<at::Tensor> like = shape_of(op, torch::jit::last(*stack, count));
    if (!like || !like->is_floating_point() || like->numel() == 0 || like->nbytes() < engine_->min_paged_bytes()) {
        op.redispatchBoxed(keys, stack);
        return;
    }
    at::Tensor bucket = engine_->buckets().make(engine_, *like, is_home_);
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(bucket));
}

}  // namespace torch_offload
