#include "codec/coder_tables.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace torch_offload {

SharedTunstallWords CoderTables::words_of(const TunstallClass& coded) {
    {
        const std::lock_guard lock(mutex_);
        if (SharedTunstallWords words = find(coded)) return words;
    }
    auto made = std::make_shared<const TunstallWords>(TunstallTree(coded.odds, coded.limit));
    const std::lock_guard lock(mutex_);
    ++made_count_;
    if (SharedTunstallWords words = find(coded)) return words;
    keep(coded, made);
    return made;
}

std::size_t CoderTables::made_count() const {
    const std::lock_guard lock(mutex_);
    return made_count_;
}

std::size_t CoderTables::table_count() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
}

SharedTunstallWords CoderTables::find(const TunstallClass& coded) {
    const auto found = std::ranges::find(entries_, coded, &Entry::coded);
    if (found == entries_.end()) return nullptr;
    found->last_use = ++use_count_;
    return found->words;
}

void CoderTables::keep(const TunstallClass& coded, SharedTunstallWords words) {
    if (most_tables_ == 0) return;
    if (entries_.size() >= most_tables_) entries_.erase(std::ranges::min_element(entries_, {}, &Entry::last_use));
    entries_.push_back({coded, std::move(words), ++use_count_});
}

}  // namespace torch_offload
