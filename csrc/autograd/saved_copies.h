// Copies of storages that graphs keep, made once however many nodes keep the same. Layer autograd.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace torch_offload {

/// Owns nothing: a copy lives as long as a graph that keeps it.
/// Threads: any.
class SavedCopies {
public:
    /// The copy of `from` as it was when tensors over it had counted `version` changes, or an empty storage.
    c10::Storage find(const c10::Storage& from, std::uint32_t version);
    void add(const c10::Storage& from, std::uint32_t version, const c10::Storage& copy);

private:
    struct Entry {
        c10::weak_intrusive_ptr<c10::StorageImpl> from;  // keeps the address from becoming another's
        std::uint32_t version = 0;
        c10::weak_intrusive_ptr<c10::StorageImpl> copy;
    };
    void drop_dead();

    static constexpr std::size_t kFewEntries = 64;
    std::mutex mutex_;  // guards what follows
    std::unordered_map<const c10::StorageImpl*, Entry> entries_;
    std::size_t entries_to_sweep_ = kFewEntries;
};

}  // namespace torch_offload
