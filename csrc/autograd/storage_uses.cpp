#include "autograd/storage_uses.h"

#include <utility>

#include "autograd/paged_storage.h"

namespace torch_offload {

void StorageUses::begin(c10::StorageImpl& storage) {
    const std::lock_guard lock(mutex_);
    if (++count_ == 1) set_address_refused(storage, false);
}

/// What was given other memory meanwhile is not ours any more.
void StorageUses::end(c10::StorageImpl& storage) {
    const std::lock_guard lock(mutex_);
    const Block* const block = block_of(storage);
    if (--count_ == 0 && block && block->uses.get() == this) set_address_refused(storage, true);
}

void OpenStorages::open(const at::Tensor& tensor) {
    const Block* const block = block_of(tensor);
    if (!block || !block->uses) return;
    entries_.push_back({tensor.storage(), block->uses});
    block->uses->begin(*tensor.storage().unsafeGetStorageImpl());
}

OpenStorages::~OpenStorages() {
    for (Entry& entry : entries_) {
        if (entry.uses) entry.uses->end(*entry.storage.unsafeGetStorageImpl());
    }
}

}  // namespace torch_offload
