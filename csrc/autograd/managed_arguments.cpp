#include "autograd/managed_arguments.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "autograd/applied_gradient.h"
#include "autograd/forked_child.h"
#include "autograd/overwrites.h"
#include "autograd/profiler_range.h"
#include "base/check.h"

namespace torch_offload {
namespace {

constexpr std::size_t kFewSpans = 16;
constexpr std::uint64_t kCallsPerLeaseSweep = 1024;

/// Calls of this thread that hold pins: the outermost one manages again what those inside replaced.
thread_local int calls_in_progress = 0;

std::uint64_t functionality_of(c10::DispatchKeySet keys) {
    return keys.raw_repr() & ~static_cast<std::uint64_t>(c10::full_backend_mask);
}

const std::uint64_t kPlainFunctionality = functionality_of(
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradOther, c10::DispatchKey::AutocastCPU,
                         c10::DispatchKey::AutocastCUDA, kPagedKey, kNestedKey}));
/// The devices of managed tensors. A number on the host may come with tensors on a GPU.
const std::uint64_t kPlainBackends = c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA}).raw_repr() &
                                     static_cast<std::uint64_t>(c10::full_backend_mask);

/// The bytes of the storage from the tensor's first element to its last.
struct ByteSpan {
    std::size_t begin = 0;
    std::size_t end = 0;
};

ByteSpan bytes_of(const at::Tensor& tensor) {
    std::int64_t last = tensor.storage_offset();
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto element_bytes = static_cast<std::size_t>(tensor.element_size());
    return {static_cast<std::size_t>(tensor.storage_offset()) * element_bytes,
            (static_cast<std::size_t>(last) + 1) * element_bytes};
}

/// A copy between GPUs is made by the one that has the source, and no other GPU has access to the pages of this one.
void check_sources(const at::Tensor& written, c10::ArrayRef<c10::IValue> arguments) {
    for_each_tensor(arguments, [&](std::size_t, const at::Tensor& tensor) {
        OFFLOAD_CHECK(tensor.device().is_cpu() || tensor.device() == written.device(), InvalidArgument,
                      "a tensor that is paged on ", written.device(), " cannot be written from one on ",
                      tensor.device(), ", which has no access to pages; bring that one here before: tensor.to(\"",
                      written.device(), "\")");
    });
}

}  // namespace

bool is_plain_call(c10::DispatchKeySet keys) noexcept {
    return (functionality_of(keys) & ~kPlainFunctionality) == 0 &&
           (keys.raw_repr() & static_cast<std::uint64_t>(c10::full_backend_mask) & ~kPlainBackends) == 0;
}

void call_kernel(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
    std::optional<c10::impl::ExcludeDispatchKeyGuard> below_fallback;
    if (traits.uses_arguments_only && is_plain_call(keys)) below_fallback.emplace(kPagedKeys);
    op.redispatchBoxed(keys_below(keys), stack);
}

ManagedArguments::ManagedArguments(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments,
                                   c10::DispatchKeySet keys) {
    for_each_tensor(arguments, [&](std::size_t position, const at::Tensor& tensor) {
        Block* block = block_of(tensor);
        if (!block) return;
        if (traits.kind == OperatorKind::resizing) {
            check_has_bytes(*block);
            return add_whole(tensor, *block);
        }
        if (tensor.numel() == 0) {  // kernels ask for its address, and use no byte
            if (block->uses) to_open_.push_back(tensor);
            return;
        }
        if (traits.kind == OperatorKind::counting && !c10::isIntegralType(tensor.scalar_type(), false)) return;
        Access access = traits.writes[position] ? Access::write : Access::read;
        if (position == 0 && overwrites_storage(traits, arguments, keys)) access = Access::overwrite;
        if (access == Access::overwrite) {
            block->is_applied.store(false, std::memory_order_relaxed);
        } else {
            check_has_bytes(*block);
        }
        add(tensor, *block, access);
    });
    if (!written_.empty() && !written_.front().tensor.device().is_cpu()) {
        check_sources(written_.front().tensor, arguments);
    }
}

ManagedArguments::~ManagedArguments() {
    if (is_counted_) --calls_in_progress;
}

/// The span of the block's segment, new if there was none.
ManagedArguments::Span& ManagedArguments::span_of(const Block& block) {
    const Segment* segment = block.segment.get();
    if (spans_.size() < kFewSpans) {
        for (Span& span : spans_) {
            if (span.segment.get() == segment) return span;
        }
    } else {
        if (index_.empty()) {
            for (std::size_t i = 0; i < spans_.size(); ++i) index_.emplace(spans_[i].segment.get(), i);
        }
        const auto [found, is_new] = index_.emplace(segment, spans_.size());
        if (!is_new) return spans_[found->second];
    }
    spans_.push_back({block.engine, block.segment, Access::read, block.segment->page_count(), 0});
    return spans_.back();
}

void ManagedArguments::add(const at::Tensor& tensor, Block& block, Access access) {
    if (block.uses) to_open_.push_back(tensor);
    Span& span = span_of(block);
    const ByteSpan bytes = bytes_of(tensor);
    const std::size_t page_bytes = span.segment->page_bytes();
    const bool is_first = span.end_page == 0;
    span.first_page = std::min(span.first_page, bytes.begin / page_bytes);
    span.end_page = std::max(span.end_page, std::min((bytes.end - 1) / page_bytes + 1, span.segment->page_count()));
    // The storage must be read if any argument reads it, whatever the others do.
    span.access = is_first ? access : (span.access == access ? access : Access::write);
    if (access == Access::read) return;
    block.write_count.fetch_add(1, std::memory_order_relaxed);
    written_.push_back({tensor, block.engine, block.segment});
}

bool ManagedArguments::must_succeed() const noexcept {
    return std::any_of(spans_.begin(), spans_.end(), [](const Span& span) { return span.access == Access::overwrite; });
}

/// A storage that grows is copied as a whole, however little of it the tensor shows.
void ManagedArguments::add_whole(const at::Tensor& tensor, Block& block) {
    if (block.uses) to_open_.push_back(tensor);
    Span& span = span_of(block);
    span.first_page = 0;
    span.end_page = span.segment->page_count();
    span.access = Access::write;
    block.write_count.fetch_add(1, std::memory_order_relaxed);
    written_.push_back({tensor, block.engine, block.segment});
}

void ManagedArguments::pin_whole(Engine& engine) {
    c10::SmallVector<PinRequest, 8> requests;
    for (const Span& span : spans_) {
        if (span.engine.get() == &engine && span.is_whole()) requests.push_back({span.segment, span.access});
    }
    if (!requests.empty()) guards_.push_back(engine.pin({requests.data(), requests.size()}));
}

bool ManagedArguments::is_in_memory() const noexcept {
    return std::all_of(spans_.begin(), spans_.end(), [](const Span& span) {
        std::size_t page = span.first_page;
        while (page < span.end_page && Pager::in_memory(*span.segment, page)) ++page;
        return page == span.end_page;
    });
}

/// What is overwritten is the first span, whole, and comes in the last pin: with that its bytes are gone.
void ManagedArguments::pin_all() {
    const ProfilerRange range("torch_offload::wait_for_pages", [this] { return !is_in_memory(); });
    const bool is_overwriting = must_succeed();
    if (is_overwriting) pin_parts();
    for (std::size_t i = spans_.size(); i-- > 0;) {
        const auto is_same = [&](const Span& earlier) { return earlier.engine == spans_[i].engine; };
        if (std::none_of(spans_.begin(), spans_.begin() + i, is_same)) pin_whole(*spans_[i].engine);
    }
    if (!is_overwriting) pin_parts();
}

void ManagedArguments::pin_parts() {
    for (const Span& span : spans_) {
        if (span.is_whole()) continue;
        guards_.push_back(
            span.engine->pin_pages(span.segment, span.first_page, span.end_page - span.first_page, span.access));
    }
}

void ManagedArguments::open() {
    for (const at::Tensor& tensor : to_open_) open_.open(tensor);
}

void ManagedArguments::pin() {
    OFFLOAD_CHECK(!in_forked_child(), OffloadError, spans_.front().segment->label,
                  " is paged by the parent process and cannot be used in a forked child; start the child with the "
                  "spawn method, or clone the tensor before the fork");
    for (const Span& span : spans_) span.engine->pager().touch(span.segment);
    pin_all();
    open();
    ++calls_in_progress;
    is_counted_ = true;
    const Counter& calls = engine().counters.fallback_calls;
    engine().counters.fallback_calls.increment();
    if (calls.get() % kCallsPerLeaseSweep == 0) engine().sweep_leases();
}

void ManagedArguments::manage_replaced() {
    if (calls_in_progress > 1) return;
    for (const Written& written : written_) {
        if (segment_of(written.tensor) == written.segment) continue;
        written.engine->try_manage(written.tensor, role_of(*written.segment));
    }
}

void ManagedArguments::hold_for(c10::ArrayRef<c10::IValue> results) {
    CollectiveHolds::Guards guards(std::make_move_iterator(guards_.begin()), std::make_move_iterator(guards_.end()));
    guards_.clear();
    for (PinGuard& guard : guards) guard.keep();
    const bool is_bucket = std::ranges::any_of(
        spans_, [](const Span& span) { return span.engine->buckets().has(span.segment->trace_id); });
    engine().collective_holds().hold(spans_.front().engine, results, std::move(guards), is_bucket);
}

}  // namespace torch_offload
