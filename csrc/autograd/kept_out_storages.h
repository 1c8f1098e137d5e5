// Storages that stay ordinary memory whatever is saved of them. Layer autograd.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace torch_offload {

/// Who owns them gives their memory back and takes it again: they must not become pages. Keeps none of them alive.
/// Threads: any.
class KeptOutStorages {
public:
    void add(const c10::Storage& storage);
    bool contains(const c10::StorageImpl& storage);

private:
    static constexpr std::size_t kFewEntries = 64;
    std::atomic<bool> is_empty_{true};  // of most programs, without a lock
    std::mutex mutex_;                  // guards what follows
    std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
    std::size_t count_to_sweep_ = kFewEntries;
};

}  // namespace torch_offload
