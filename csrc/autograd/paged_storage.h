// Tensors whose storage is a segment: the key they carry and the context of their DataPtr. The only file that does
// key-set and storage surgery. Layer autograd: may include torch and every layer below.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <atomic>
#include <memory>
#include <string>

#include "pager/pager.h"

namespace torch_offload {

class Engine;
class StorageUses;
struct GradientNorm;

/// The dispatch keys that a managed tensor carries. Views and `.data` inherit them, results do not.
/// The upper one lies above autograd and above whatever is written in Python: modes, and tensor subclasses. Those call
/// operators on other tensors, such as the local part of a DTensor, with all keys above Python excluded: such calls
/// meet the lower key.
inline constexpr c10::DispatchKey kPagedKey = c10::DispatchKey::DeferredInit;
inline constexpr c10::DispatchKey kNestedKey = c10::DispatchKey::CustomRNGKeyId;
inline constexpr c10::DispatchKeySet kPagedKeys({kPagedKey, kNestedKey});

/// Context of a managed storage's DataPtr.
/// Members are destroyed from the last to the first, so the engine outlives the segment.
struct Block {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Segment> segment;

    /// Writes through the dispatcher, recorded ones included. Tells whether something computed from the bytes holds.
    std::atomic<std::uint64_t> write_count{0};
    /// Somebody got the bare address by a pin or a lease: from then on writes may happen that are not counted.
    std::atomic<bool> is_raw_exposed{false};
    std::atomic<std::shared_ptr<const GradientNorm>> norm;
    /// Of a gradient: the backward has used it up (applied_gradient.h). It has no bytes until all of it is overwritten.
    std::atomic<bool> is_applied{false};
    /// Who uses the bare address now; nullptr on the host, where an access to a page that is not there is served.
    std::shared_ptr<StorageUses> uses;
};

SegmentRole role_of(const Segment& segment);

/// The block behind a tensor's storage, or nullptr if the storage is not managed.
Block* block_of(const at::Tensor& tensor) noexcept;
Block* block_of(const c10::StorageImpl& storage) noexcept;

/// The segment behind a tensor's storage, or an empty pointer.
const std::shared_ptr<Segment>& segment_of(const at::Tensor& tensor) noexcept;

bool has_paged_keys(const at::Tensor& tensor) noexcept;
void add_paged_keys(const at::Tensor& tensor);
void remove_paged_keys(const at::Tensor& tensor);

/// Whether torch refuses to say where the bytes of the storage are: to its own kernels, to tensors that look at the
/// storage without the key, to `data_ptr()`. It raises an error that names this library.
void set_address_refused(c10::StorageImpl& storage, bool is_refused);

/// True for what may become a segment: a strided tensor with elements, where the engine computes, over ordinary memory
/// of its own process.
bool is_manageable(const Engine& engine, const at::Tensor& tensor);

/// True if manage() would make pages of the tensor's storage where it lies.
bool is_adoptable(Engine& engine, const at::Tensor& tensor);

/// True if the tensor's storage is whole memory that torch's allocator for its device handed out.
bool is_allocated(const at::Tensor& tensor);

/// True if the tensor's elements are the whole storage, each once: nothing of the storage lies outside of it.
bool covers_storage(const at::Tensor& tensor);

/// True if the tensor's elements are the first of the storage, each once, as those of a shard that is padded.
bool leads_storage(const at::Tensor& tensor);

/// Makes the tensor's storage a segment and keys the tensor. A storage that is a temporary of this engine
/// (temporaries.h) is adopted where it lies; any other is copied once into a new segment and its old memory freed. A
/// storage that is managed already keeps its segment, which is returned: tied tensors share it. Pre:
/// is_manageable(engine, tensor). The whole storage becomes the segment; its address never changes again.
std::shared_ptr<Segment> manage(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor, SegmentRole role);

/// A flat keyed tensor of all bytes of a managed storage, made without asking for their address.
at::Tensor bytes_over(c10::Storage storage);

/// A storage over a new segment with a copy of all bytes of the tensor's, which stays as it is.
/// Pre: is_manageable(engine, tensor), not managed.
c10::Storage copy_into_pages(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor, SegmentRole role);
/// A keyed tensor that looks at `storage` in the way in which `tensor` looks at its own, and counts changes in place
/// together with it. Pre: `storage` is managed.
at::Tensor look_alike(const at::Tensor& tensor, c10::Storage storage);

/// Has the storage be a new segment of zeros that owns no bytes yet; what it held is gone, and its address another one.
/// Pre: nobody uses its bytes, and it is ordinary memory of the host or a segment of the engine.
void give_zeros(const std::shared_ptr<Engine>& engine, const c10::Storage& storage, std::size_t element_bytes,
                SegmentRole role);

/// A tensor of zeros shaped like `like`, keyed, over a new segment that owns no bytes yet. Pre: `like` has elements.
at::Tensor make_zero_tensor(const std::shared_ptr<Engine>& engine, const at::Tensor& like, c10::ScalarType dtype,
                            c10::MemoryFormat memory_format, SegmentRole role);

/// Gives a tensor of a module on the host memory where the engine computes: pages from `min_paged_bytes` on, torch's
/// allocator's below. It is the same tensor elsewhere; the host's memory goes with its last user. Does nothing to what
/// is not a strided tensor of the host, or where that is where the engine computes. Throws what a pin throws.
void bring_to_device(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor, SegmentRole role);

/// Makes the storage ordinary memory of the host's again and removes the key from `tensor`. Throws what a pin throws.
void unmanage(const at::Tensor& tensor);
/// The same for a tensor that was too small to be managed.
void bring_to_host(Engine& engine, const at::Tensor& tensor);

}  // namespace torch_offload
