#include "autograd/paged_storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "autograd/engine.h"
#include "autograd/forked_child.h"
#include "autograd/mapped_copy.h"
#include "autograd/storage_uses.h"
#include "autograd/temporaries.h"
#include "base/check.h"
#include "base/units.h"

namespace torch_offload {
namespace {

const std::shared_ptr<Segment> kNoSegment;
constexpr std::size_t kMaxAhead = 8;  // pages that are read while others are copied out

/// The only legal way to the protected key set of a tensor that exists already.
struct KeySetAccess : c10::TensorImpl {
    static constexpr auto member() { return &KeySetAccess::key_set_; }
};

c10::DispatchKeySet& key_set_of(const at::Tensor& tensor) noexcept {
    return tensor.unsafeGetTensorImpl()->*KeySetAccess::member();
}

/// The only legal way to the flags of a storage: before torch 2.13 no function takes the refusal back.
template <bool c10::StorageImpl::* Refuses, bool c10::StorageImpl::* Checks>
struct StorageFlags {
    friend void set_flags(c10::StorageImpl& storage, bool is_refused) {
        storage.*Refuses = is_refused;
        storage.*Checks = is_refused;
    }
};
void set_flags(c10::StorageImpl& storage, bool is_refused);
template struct StorageFlags<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                             &c10::StorageImpl::has_mutable_data_ptr_check_>;

constexpr const char* kRefusal =
    "this memory is paged by torch_offload, which was not told of this use and may have moved it to the host: call "
    "what "
    "uses bare addresses (Triton, CuPy, extensions) inside torch_offload.pinned(module), or give it a clone()";

/// Where nothing serves an access to a page that is not there, torch raises instead of making one.
void refuse_address(c10::StorageImpl& storage) {
    const Block* block = block_of(storage);
    if (!block || !block->uses) return;
    storage.get_extra_meta().custom_data_ptr_error_msg_ = kRefusal;
    set_address_refused(storage, true);
}

/// The parent's threads and locks are not in a forked child.
void block_deleter(void* context) noexcept {
    if (in_forked_child()) return;
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    BlockAccount::remove(*block->engine);
    block->engine->deferred().release(std::move(block->segment));
}

c10::DataPtr data_ptr_over(std::shared_ptr<Engine> engine, std::shared_ptr<Segment> segment) {
    BlockAccount::add(*engine);
    auto block = std::make_unique<Block>();
    block->engine = std::move(engine);
    block->segment = std::move(segment);
    void* address = block->segment->range().data();
    const c10::Device torch_device = block->engine->torch_device();
    if (!torch_device.is_cpu()) block->uses = std::make_shared<StorageUses>();
    return {address, block.release(), &block_deleter, torch_device};
}

void copy_out(Engine& engine, const std::shared_ptr<Segment>& segment, std::byte* target, std::size_t size_bytes) {
    const std::size_t page_count = segment->page_count();
    for (std::size_t page = 0; page < page_count; ++page) {
        const std::size_t begin = page * segment->page_bytes();
        const std::span to(target + begin, std::min(segment->page_bytes(), size_bytes - begin));
        const std::size_t ahead_end = std::min(page + 1 + kMaxAhead, page_count);
        try {
            for (std::size_t next = page; next < ahead_end; ++next) engine.pager().prefetch_page(segment, next);
            const PinGuard guard = engine.pin_pages(segment, page, 1, Access::read);
            copy_bytes(to, c10::kCPU, segment->range().subspan(begin, to.size()), engine.torch_device());
        } catch (const std::exception&) {
            if (!engine.pager().salvage(*segment, page, to)) throw;
        }
    }
}

/// The temporary that the storage lies in, if it can become pages of `engine` where it is.
std::optional<Temporary> adoptable(Engine& engine, c10::StorageImpl& storage) {
    const c10::DataPtr& pointer = storage._mutable_data_ptr_no_checks();
    if (pointer.get() != pointer.get_context()) return std::nullopt;
    std::optional<Temporary> temporary = find_temporary(pointer.get());
    const bool fits = temporary && temporary->engine.get() == &engine &&
                      temporary->range.size() == round_up(storage.nbytes(), kSectorBytes) &&
                      engine.pager().can_adopt_ranges();
    return fits ? temporary : std::nullopt;
}

void adopt_storage(const Temporary& temporary, c10::StorageImpl& storage, std::size_t element_bytes, SegmentRole role) {
    Engine& engine = *temporary.engine;
    auto segment = engine.pager().adopt_range(temporary.range, storage.nbytes(), element_bytes, std::move(role));
    engine.counters.adopted_bytes.add(storage.nbytes());
    take_temporary(temporary.range.data());
    storage._mutable_data_ptr_no_checks().release_context();  // the range is the segment's now
    storage.set_data_ptr_noswap(data_ptr_over(temporary.engine, std::move(segment)));
}

/// A new segment with the bytes of the storage.
std::shared_ptr<Segment> segment_with(const std::shared_ptr<Engine>& engine, c10::StorageImpl& storage,
                                      std::size_t element_bytes, SegmentRole role) {
    const auto* begin = static_cast<const std::byte*>(storage.mutable_data());  // mutable: materializes a lazy copy
    const std::span source(begin, storage.nbytes());
    const bool is_mapped = storage.data_ptr().get_context() != begin && engine->torch_device().is_cpu();
    auto segment = engine->pager().create_segment(storage.nbytes(), element_bytes, role.kind);
    segment->assume(std::move(role));
    if (is_mapped) {
        engine->mapped_copy().copy_in(segment, source);
    } else {
        copy_in(*engine, segment, source, storage.device());
        engine->counters.copied_bytes.add(storage.nbytes());
    }
    return segment;
}

void copy_storage(const std::shared_ptr<Engine>& engine, c10::StorageImpl& storage, std::size_t element_bytes,
                  SegmentRole role) {
    storage.set_data_ptr_noswap(data_ptr_over(engine, segment_with(engine, storage, element_bytes, std::move(role))));
    refuse_address(storage);
}

c10::Storage make_storage(c10::DataPtr memory, std::size_t size_bytes) {
    c10::Allocator* const allocator = c10::GetAllocator(memory.device().type());
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                         c10::SymInt(static_cast<std::int64_t>(size_bytes)),
                                                         std::move(memory), allocator, /*resizable=*/true);
    refuse_address(*storage);
    return c10::Storage(std::move(storage));
}

at::Tensor make_tensor(c10::Storage storage, caffe2::TypeMeta dtype) {
    const c10::DispatchKey key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
}

/// A tensor that looks at `storage` in the way in which `tensor` looks at its own.
at::Tensor shaped_like(const at::Tensor& tensor, c10::Storage storage) {
    at::Tensor there = make_tensor(std::move(storage), tensor.dtype());
    c10::TensorImpl& impl = *there.unsafeGetTensorImpl();
    impl.set_storage_offset(tensor.storage_offset());
    impl.set_sizes_and_strides(tensor.sizes(), tensor.strides());
    there._set_conj(tensor.is_conj());
    there._set_neg(tensor.is_neg());
    return there;
}

/// The tensor looks at `storage` from now on, in the way it looked at its own.
void set_storage(const at::Tensor& tensor, c10::Storage storage) {
    tensor.set_data(shaped_like(tensor, std::move(storage)));
}

bool has_ordinary_storage(const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() && tensor.has_storage() &&
           !tensor.key_set().has(c10::DispatchKey::Python);
}

/// Ordinary memory of a device with the bytes of `storage`.
c10::Storage copy_of_storage(const c10::Storage& storage, c10::Device torch_device) {
    const c10::DeviceGuard guard(torch_device);
    c10::Storage copy =
        make_storage(c10::GetAllocator(torch_device.type())->allocate(storage.nbytes()), storage.nbytes());
    const auto* const source = static_cast<const std::byte*>(storage.data());
    auto* const target = static_cast<std::byte*>(copy.mutable_data());
    if (storage.nbytes() > 0)
        copy_bytes({target, copy.nbytes()}, torch_device, {source, copy.nbytes()}, storage.device());
    return copy;
}

/// What the engine made of the storage already, or what `make` makes of it now.
template <typename Make>
c10::Storage moved(Engine& engine, const c10::Storage& storage, Make make) {
    c10::Storage there = engine.moved_storage(storage);
    if (there) return there;
    there = make();
    engine.note_moved(storage, there);
    return there;
}

}  // namespace

SegmentRole role_of(const Segment& segment) {
    return {segment.kind(), segment.label, segment.trace_id, segment.anchor_id.load()};
}

Block* block_of(const c10::StorageImpl& storage) noexcept {
    // The accessor without checks: others throw for storages of fake tensors, which are never ours.
    const c10::DataPtr& pointer = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks();
    return pointer.get_deleter() == &block_deleter ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

Block* block_of(const at::Tensor& tensor) noexcept {
    if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return nullptr;
    const c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    return storage ? block_of(*storage) : nullptr;
}

const std::shared_ptr<Segment>& segment_of(const at::Tensor& tensor) noexcept {
    const Block* block = block_of(tensor);
    return block ? block->segment : kNoSegment;
}

bool has_paged_keys(const at::Tensor& tensor) noexcept {
    return tensor.defined() && key_set_of(tensor).has_all(kPagedKeys);
}

void add_paged_keys(const at::Tensor& tensor) { key_set_of(tensor) = key_set_of(tensor) | kPagedKeys; }

void set_address_refused(c10::StorageImpl& storage, bool is_refused) { set_flags(storage, is_refused); }

void remove_paged_keys(const at::Tensor& tensor) { key_set_of(tensor) = key_set_of(tensor) - kPagedKeys; }

namespace {

bool has_own_memory(const at::Tensor& tensor) {
    if (!has_ordinary_storage(tensor) || tensor.numel() == 0) return false;
    const c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const c10::DataPtr& pointer = const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks();
    if (!pointer || storage->nbytes() == 0) return false;
    if (!pointer.device().is_cpu()) return true;
    // Memory shared with other processes cannot move under them.
    const at::MapAllocator* mapping = at::MapAllocator::fromDataPtr(pointer);
    return !mapping || (mapping->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) == 0;
}

}  // namespace

bool is_manageable(const Engine& engine, const at::Tensor& tensor) {
    return tensor.defined() && tensor.device() == engine.torch_device() && has_own_memory(tensor);
}

bool is_allocated(const at::Tensor& tensor) {
    const c10::DataPtr& pointer = tensor.storage().data_ptr();
    return pointer.get() == pointer.get_context();
}

bool is_adoptable(Engine& engine, const at::Tensor& tensor) {
    return adoptable(engine, *tensor.storage().unsafeGetStorageImpl()).has_value();
}

bool covers_storage(const at::Tensor& tensor) {
    return leads_storage(tensor) && tensor.nbytes() == tensor.storage().nbytes();
}

bool leads_storage(const at::Tensor& tensor) {
    return tensor.has_storage() && tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
           tensor.nbytes() <= tensor.storage().nbytes();
}

std::shared_ptr<Segment> manage(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor, SegmentRole role) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    if (!block_of(storage)) {
        const auto element_bytes = static_cast<std::size_t>(tensor.element_size());
        if (const std::optional<Temporary> temporary = adoptable(*engine, storage)) {
            adopt_storage(*temporary, storage, element_bytes, std::move(role));
        } else {
            copy_storage(engine, storage, element_bytes, std::move(role));
        }
    }
    add_paged_keys(tensor);
    return segment_of(tensor);
}

at::Tensor bytes_over(c10::Storage storage) {
    const auto count = static_cast<std::int64_t>(storage.nbytes());
    const at::Tensor bytes = make_tensor(std::move(storage), c10::scalarTypeToTypeMeta(c10::kByte));
    bytes.unsafeGetTensorImpl()->set_sizes_contiguous({count});
    add_paged_keys(bytes);
    return bytes;
}

c10::Storage copy_into_pages(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor, SegmentRole role) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    auto segment = segment_with(engine, storage, static_cast<std::size_t>(tensor.element_size()), std::move(role));
    return make_storage(data_ptr_over(engine, std::move(segment)), storage.nbytes());
}

at::Tensor look_alike(const at::Tensor& tensor, c10::Storage storage) {
    at::Tensor alike = shaped_like(tensor, std::move(storage));
    alike.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
    add_paged_keys(alike);
    return alike;
}

void give_zeros(const std::shared_ptr<Engine>& engine, const c10::Storage& storage, std::size_t element_bytes,
                SegmentRole role) {
    auto segment = engine->pager().create_segment(storage.nbytes(), element_bytes, role.kind);
    segment->assume(std::move(role));
    engine->counters.zero_segments.increment();
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(data_ptr_over(engine, std::move(segment)));
}

at::Tensor make_zero_tensor(const std::shared_ptr<Engine>& engine, const at::Tensor& like, c10::ScalarType dtype,
                            c10::MemoryFormat memory_format, SegmentRole role) {
    const auto element_bytes = c10::elementSize(dtype);
    const std::size_t size_bytes = static_cast<std::size_t>(like.numel()) * element_bytes;
    auto segment = engine->pager().create_segment(size_bytes, element_bytes, role.kind);
    segment->assume(std::move(role));
    engine->counters.zero_segments.increment();
    at::Tensor zeros = make_tensor(make_storage(data_ptr_over(engine, std::move(segment)), size_bytes),
                                   c10::scalarTypeToTypeMeta(dtype));
    c10::TensorImpl& impl = *zeros.unsafeGetTensorImpl();
    if (memory_format != c10::MemoryFormat::Preserve) {
        impl.set_sizes_contiguous(like.sizes());
        impl.empty_tensor_restride(memory_format);
    } else if (like.is_non_overlapping_and_dense()) {
        impl.set_sizes_and_strides(like.sizes(), like.strides());
    } else {
        impl.set_sizes_and_strides(like.sizes(), at::infer_dense_strides(like.sizes(), like.strides()));
    }
    add_paged_keys(zeros);
    return zeros;
}

void bring_to_device(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor, SegmentRole role) {
    const c10::Device torch_device = engine->torch_device();
    if (torch_device.is_cpu() || !tensor.device().is_cpu() || !has_ordinary_storage(tensor)) return;
    const bool is_paged = has_own_memory(tensor) && tensor.nbytes() >= engine->min_paged_bytes();
    const c10::Storage storage = tensor.storage();
    set_storage(tensor, moved(*engine, storage, [&] {
                    if (!is_paged) return copy_of_storage(storage, torch_device);
                    const auto element_bytes = static_cast<std::size_t>(tensor.element_size());
                    auto segment = engine->pager().create_segment(storage.nbytes(), element_bytes, role.kind);
                    role.trace_id = engine->pager().new_trace_id();
                    segment->assume(std::move(role));
                    const auto* const begin = static_cast<const std::byte*>(storage.data());
                    copy_in(*engine, segment, {begin, storage.nbytes()}, c10::kCPU);
                    engine->counters.copied_bytes.add(storage.nbytes());
                    return make_storage(data_ptr_over(engine, std::move(segment)), storage.nbytes());
                }));
    if (block_of(tensor)) add_paged_keys(tensor);
}

void unmanage(const at::Tensor& tensor) {
    const Block* block = block_of(tensor);
    if (!block) {
        remove_paged_keys(tensor);
        return;
    }
    const std::shared_ptr<Engine> engine = block->engine;
    const std::shared_ptr<Segment> segment = block->segment;
    const c10::Storage storage = tensor.storage();
    const auto bytes_on_host = [&] {
        c10::DataPtr ordinary = c10::GetDefaultCPUAllocator()->allocate(storage.nbytes());
        copy_out(*engine, segment, static_cast<std::byte*>(ordinary.get()), storage.nbytes());
        return ordinary;
    };
    remove_paged_keys(tensor);
    try {
        if (engine->torch_device().is_cpu()) {
            storage.unsafeGetStorageImpl()->set_data_ptr_noswap(bytes_on_host());
        } else {
            set_storage(tensor,
                        moved(*engine, storage, [&] { return make_storage(bytes_on_host(), storage.nbytes()); }));
        }
    } catch (...) {
        add_paged_keys(tensor);
        throw;
    }
}

void bring_to_host(Engine& engine, const at::Tensor& tensor) {
    if (tensor.device() != engine.torch_device() || engine.torch_device().is_cpu() || !has_ordinary_storage(tensor))
        return;
    const c10::Storage storage = tensor.storage();
    set_storage(tensor, moved(engine, storage, [&] { return copy_of_storage(storage, c10::kCPU); }));
}

}  // namespace torch_offload
