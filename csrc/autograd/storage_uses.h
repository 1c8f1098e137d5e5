// Uses of the bare addresses of managed storages, where torch refuses them otherwise. Layer autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <memory>
#include <mutex>

namespace torch_offload {

/// How many use the bytes of a storage by their address now.
/// Threads: any.
class StorageUses {
public:
    void begin(c10::StorageImpl& storage);
    void end(c10::StorageImpl& storage);

private:
    std::mutex mutex_;  // guards the number and the storage's flag
    std::size_t count_ = 0;
};

/// While it lives, torch gives out the addresses of the tensors that were opened. They are pinned for as long.
/// On the host, where an access to a page that is not there is served, it does nothing.
class OpenStorages {
public:
    OpenStorages() = default;
    OpenStorages(OpenStorages&& other) noexcept { swap(other); }
    OpenStorages& operator=(OpenStorages&& other) noexcept {
        swap(other);
        return *this;
    }
    ~OpenStorages();

    /// Does nothing to a tensor that is not managed.
    void open(const at::Tensor& tensor);
    void swap(OpenStorages& other) noexcept { entries_.swap(other.entries_); }

private:
    struct Entry {
        c10::Storage storage;
        std::shared_ptr<StorageUses> uses;
    };
    c10::SmallVector<Entry, 4> entries_;
};

}  // namespace torch_offload
