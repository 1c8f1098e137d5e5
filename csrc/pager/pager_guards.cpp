#include "pager/pager_guards.h"

#include <mutex>

namespace torch_offload {

Pager::Impl::Overwriting::~Overwriting() {
    for (Page* page : pages_) pager_.undo_overwrite(*page);
}

void Pager::Impl::Overwriting::confirm() noexcept {
    if (pages_.empty()) return;
    {
        const std::lock_guard lock(pager_.mutex);
        for (Page* page : pages_) pager_.page_errors.erase(page);
    }
    for (Page* page : pages_) {
        page->enter(PageState::mapped, PageWord::kDirty, PageWord::kUndefined);
    }
    pages_.clear();
}

/// Pre: the page is undefined and the caller has a pin on it. Its bytes are where they were before: in the store,
/// nowhere, or lost.
void Pager::Impl::undo_overwrite(Page& page) noexcept {
    if (page.load().state() == PageState::mapped) {
        page.enter(PageState::busy);
        take_out_of_segment(page);
    }
    if (page.frame) retire_frame(page);
    PageState before = PageState::zero;
    if (page.load().has(PageWord::kStored)) {
        before = PageState::stored;
    } else if (const std::lock_guard lock(mutex); page_errors.contains(&page)) {
        before = PageState::failed;
    }
    page.enter(before, 0, PageWord::kUndefined | PageWord::kWritable);
    announce_progress();
}

}  // namespace torch_offload
