#include "autograd/kept_out_storages.h"

#include <algorithm>

namespace torch_offload {

void KeptOutStorages::add(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    storages_.insert_or_assign(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    is_empty_.store(false, std::memory_order_release);
    if (storages_.size() < count_to_sweep_) return;
    std::erase_if(storages_, [](const auto& entry) { return entry.second.expired(); });
    count_to_sweep_ = std::max(kFewEntries, 2 * storages_.size());
}

bool KeptOutStorages::contains(const c10::StorageImpl& storage) {
    if (is_empty_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    return storages_.contains(&storage);  // the weak pointer keeps the address from becoming another's
}

}  // namespace torch_offload
