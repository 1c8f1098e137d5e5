#include "autograd/saved_copies.h"

#include <algorithm>

namespace torch_offload {

c10::Storage SavedCopies::find(const c10::Storage& from, std::uint32_t version) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(from.unsafeGetStorageImpl());
    if (found == entries_.end() || found->second.version != version) return {};
    return c10::Storage(found->second.copy.lock());
}

void SavedCopies::add(const c10::Storage& from, std::uint32_t version, const c10::Storage& copy) {
    const std::lock_guard lock(mutex_);
    entries_.insert_or_assign(from.unsafeGetStorageImpl(),
                              Entry{from.getWeakStorageImpl(), version, copy.getWeakStorageImpl()});
    if (entries_.size() >= entries_to_sweep_) drop_dead();
}

void SavedCopies::drop_dead() {
    std::erase_if(entries_,
                  [](const auto& entry) { return entry.second.from.expired() || entry.second.copy.expired(); });
    entries_to_sweep_ = std::max(kFewEntries, 2 * entries_.size());
}

}  // namespace torch_offload
