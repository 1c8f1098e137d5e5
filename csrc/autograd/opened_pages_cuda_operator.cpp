#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "autograd/coded_arguments.h"
#include "autograd/opened_pages.h"
#include "codec/coded_page.h"

namespace torch_offload {
namespace {

constexpr std::uintptr_t kPageAlignment = 16;  // what kernels load at once

/// To the device, in order of its current stream; the host has waited when this returns.
at::Tensor copied(std::span<const std::byte> bytes, at::Device device) {
    const at::Tensor host = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
    return host.to(device);
}

}  // namespace

std::shared_ptr<const OpenedPage> OpenedPages::open(const at::Tensor& page) {
    const at::Tensor host = page.to(at::kCPU);
    const std::span<const std::byte> bytes = page_bytes(host);
    const auto* const on_device = static_cast<const std::byte*>(page.const_data_ptr());
    auto opened = std::make_shared<OpenedPage>();
    for (const std::span<const std::byte> extent : extents_of(bytes)) {
        const KernelTables tables(extent, coder_tables_);
        at::Tensor there = copied(tables.bytes(), page.device());
        std::vector<SharedTable> words;
        WordTables words_at{};
        for (const TunstallClass& one : tables.word_classes()) {
            words.push_back(words_of(one, page.device()));
            words_at[words.size() - 1] = static_cast<const std::byte*>(words.back()->const_data_ptr());
        }
        const KernelMatrix matrix = tables.placed(on_device + (extent.data() - bytes.data()),
                                                  static_cast<const std::byte*>(there.const_data_ptr()), words_at);
        opened->push_back(
            {matrix, tables.has(Coder::tun12), tables.has(Coder::rans4), std::move(there), std::move(words)});
    }
    return opened;
}

SharedTable OpenedPages::words_of(const TunstallClass& coded, at::Device device) {
    const auto is_wanted = [&](const Words& one) { return one.coded == coded && one.device == device; };
    {
        const std::lock_guard lock(mutex_);
        const auto found = std::ranges::find_if(words_, is_wanted);
        if (SharedTable table = found == words_.end() ? nullptr : found->table.lock()) return table;
    }
    const auto made = std::make_shared<const at::Tensor>(copied(word_table_of(coded, coder_tables_), device));
    const std::lock_guard lock(mutex_);
    std::erase_if(words_, [](const Words& one) { return one.table.expired(); });
    words_.push_back({coded, device, made});
    return made;
}

std::shared_ptr<const OpenedPage> OpenedPages::opened(const at::Tensor& page) {
    check_page(page);
    const void* const bytes = page.const_data_ptr();
    TORCH_CHECK_VALUE(reinterpret_cast<std::uintptr_t>(bytes) % kPageAlignment == 0,
                      "a coded page on a GPU begins on a multiple of ", kPageAlignment,
                      " bytes: clone() what is a part of a tensor");
    if (page.is_inference()) return open(page);  // nothing would tell that it was written to
    const Key key{page.storage().unsafeGetStorageImpl(), bytes};
    {
        const std::lock_guard lock(mutex_);
        if (auto found = find(key, page)) return found;
    }
    const std::int64_t version = page._version();
    auto made = open(page);
    const std::lock_guard lock(mutex_);
    drop_gone();
    entries_.insert_or_assign(key, Entry{page.storage().getWeakStorageImpl(), page.numel(), version, made});
    return made;
}

std::shared_ptr<const OpenedPage> OpenedPages::find(const Key& key, const at::Tensor& page) const {
    const auto found = entries_.find(key);
    if (found == entries_.end()) return nullptr;
    const Entry& entry = found->second;
    return entry.size_bytes == page.numel() && entry.version == page._version() ? entry.page : nullptr;
}

void OpenedPages::drop_gone() {
    if (entries_.size() < drop_at_) return;
    std::erase_if(entries_, [](const auto& entry) { return entry.second.storage.expired(); });
    drop_at_ = std::max<std::size_t>(64, 2 * entries_.size());
}

}  // namespace torch_offload
