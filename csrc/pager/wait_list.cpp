#include "pager/wait_list.h"

#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include "base/wait.h"
#include "pager/page_table.h"

namespace torch_offload {
namespace {

constexpr std::uint32_t kTaken = 1;

std::string name_of(const Page& page) {
    return concat("page ", page.segment->index_of(page), " of ", page.segment->label);
}

}  // namespace

void WaitList::Lock::lock() noexcept {
    while (is_taken_.exchange(kTaken, std::memory_order_acq_rel) == kTaken) wait_for_change(is_taken_, kTaken);
}

void WaitList::Lock::unlock() noexcept {
    is_taken_.store(0, std::memory_order_release);
    wake_all(is_taken_);
}

WaitList::Entry::Entry(WaitList& list, StallCause cause, const Page* page) noexcept
    : list_(list), cause_(cause), page_(page), thread_id_(::gettid()), since_(std::chrono::steady_clock::now()) {
    const std::lock_guard lock(list_.lock_);
    next_ = list_.newest_;
    if (next_) next_->previous_ = this;
    list_.newest_ = this;
}

WaitList::Entry::~Entry() {
    const std::lock_guard lock(list_.lock_);
    (previous_ ? previous_->next_ : list_.newest_) = next_;
    if (next_) next_->previous_ = previous_;
}

std::vector<ListedWait> WaitList::waits() const {
    std::vector<ListedWait> found;
    {
        const std::lock_guard lock(lock_);
        const auto now = std::chrono::steady_clock::now();
        for (const Entry* entry = newest_; entry; entry = entry->next_) {
            found.push_back({entry->cause_, entry->thread_id_, now - entry->since_,
                             entry->page_ ? name_of(*entry->page_) : std::string()});
        }
    }
    std::ranges::sort(found, std::ranges::greater(), &ListedWait::age);
    return found;
}

}  // namespace torch_offload
