// Coded pages on GPUs, opened: what kernels are told of their matrices. Layer autograd: may include torch; CUDA build
// only.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "codec/coder_tables.h"
#include "codec/kernel_matrix.h"

namespace torch_offload {

using SharedTable = std::shared_ptr<const at::Tensor>;

/// One matrix of a page. Its pointers are into the page, and into tables on the page's device.
struct OpenedMatrix {
    KernelMatrix matrix;
    bool has_tun12 = false;
    bool has_rans4 = false;
    at::Tensor tables;               // uint8
    std::vector<SharedTable> words;  // of its classes, shared with other matrices of the same odds
};
using OpenedPage = std::vector<OpenedMatrix>;

/// The pages that kernels have met, each opened when it is first used: its bytes are copied to the host, which waits
/// for them, checks them to the last codeword and makes the tables, which stay on the device while the page's storage
/// lives. Later uses wait for nothing.
///
/// A page is known by its storage, its address there, its size and its version, which is raised by what torch writes
/// to the page or to a view of it; a page whose storage is gone, or that was written to, is opened again. An inference
/// tensor has no version, so it is opened, and the host waits, each time it is used. Not seen is what changes a page
/// without raising its version, which is what writes through `.data` and what torch does not know of: products are then
/// of any values, but kernels stay inside the page and their tables.
/// Threads: any. Two that meet a page at once may both open it.
class OpenedPages {
public:
    /// Pre: `page` is on a GPU, which is the current device.
    /// Throws: c10::Error unless it is uint8 with one dimension, without gaps, on a multiple of 16 bytes; CorruptPage
    ///         and InvalidArgument as KernelTables does.
    std::shared_ptr<const OpenedPage> opened(const at::Tensor& page);

private:
    using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
    using Key = std::pair<const c10::StorageImpl*, const void*>;  // a weak reference keeps the first one's address
    struct Entry {
        WeakStorage storage;
        std::int64_t size_bytes;
        std::int64_t version;
        std::shared_ptr<const OpenedPage> page;
    };
    struct Words {
        TunstallClass coded;
        at::Device device;
        std::weak_ptr<const at::Tensor> table;
    };
    /// Null if it is not there as it is now. Pre: the lock is held.
    std::shared_ptr<const OpenedPage> find(const Key& key, const at::Tensor& page) const;
    std::shared_ptr<const OpenedPage> open(const at::Tensor& page);
    /// The words of a class on the device; made anew if no matrix there has them.
    SharedTable words_of(const TunstallClass& coded, at::Device device);
    /// Drops those whose storages are gone, each time there are twice as many as were left the last time. Pre: the lock
    /// is held.
    void drop_gone();

    CoderTables coder_tables_;
    std::mutex mutex_;
    std::map<Key, Entry> entries_;
    std::vector<Words> words_;
    std::size_t drop_at_ = 64;
};

}  // namespace torch_offload
