#include "pager/pager_guards.h"

#include <mutex>
#include <new>

namespace torch_offload {

Pager::Impl::Overwriting::~Overwriting() {
    for (Page* page : pages_) pager_.undo_overwrite(*page);
}

void Pager::Impl::Overwriting::confirm() noexcept {
    if (pages_.empty()) return;
    {
        const std::lock_guard lock(pager_.mutex);
        for (Page* page : pages_) page->error = nullptr;
    }
    for (Page* page : pages_) {
        page->enter(PageState::mapped, PageWord::kDirty, PageWord::kUndefined);
        pager_.drop_outdated_below(*page);
    }
    pages_.clear();
}

Pager::Impl::MemoryLock::~MemoryLock() {
    const bool was_given_up = lock_->was_given_up();
    lock_.reset();
    if (was_given_up) pager_.announce_progress();
}

Pager::Impl::FrameHold::~FrameHold() {
    if (!frame_) return;
    {
        MemoryLock lock(pager_);
        pager_.arena.give_frame(frame_, lock);
    }
    pager_.announce_progress();
}

void PageAccess::hold(PinGuard& guard, std::shared_ptr<Segment> segment, std::size_t first, std::size_t count) {
    guard.held_.push_back({std::move(segment), first, count});  // before: it may fail
    Segment& held = *guard.held_.back().segment;
    for (std::size_t i = first; i < first + count; ++i) held.page(i).add_pin();
}

void drop_pins(std::span<const HeldPages> pages) noexcept {
    for (const HeldPages& held : pages) {
        for (std::size_t i = held.first; i < held.first + held.count; ++i) held.segment->page(i).drop_pin();
    }
}

PinGuard::~PinGuard() {
    if (held_.empty()) return;
    Pager::Impl& pager = *held_.front().segment->pager().impl_;
    if (std::shared_ptr<const Event> event = pager.fence_use()) {
        pager.end_use({std::move(event), std::move(held_), {}});
    } else {
        drop_pins(held_);
        pager.announce_progress();
    }
}

void PageAccess::reserve(UpdateLatch& latch, std::size_t count) {
    latch.segments_.reserve(count);
    latch.pages_.reserve(count);
    latch.bytes_.reserve(count);
    latch.locations_.reserve(count);
    latch.is_worthless_.reserve(count);
}

void PageAccess::add_here(UpdateLatch& latch, std::shared_ptr<Segment> segment, Page& page,
                          bool is_at_address) noexcept {
    const std::span<std::byte> range = segment->page_range(segment->index_of(page));
    page.add_pin();
    latch.segments_.push_back(std::move(segment));
    latch.pages_.push_back(&page);
    latch.bytes_.push_back(is_at_address ? range : page.frame.slot.first(range.size()));
    latch.locations_.push_back(is_at_address ? UpdateLatch::Location::address : UpdateLatch::Location::slot);
    latch.is_worthless_.push_back(false);
}

void PageAccess::confirm(UpdateLatch& latch, std::optional<Pager::Impl::Transient> transient) noexcept {
    latch.confirmed_ = true;
    latch.is_transient_ = transient.has_value();
    if (transient) transient->hand_over();
}

void UpdateLatch::swap(UpdateLatch& other) noexcept {
    segments_.swap(other.segments_);
    pages_.swap(other.pages_);
    bytes_.swap(other.bytes_);
    locations_.swap(other.locations_);
    is_worthless_.swap(other.is_worthless_);
    share_.swap(other.share_);
    below_.swap(other.below_);
    std::swap(finished_, other.finished_);
    std::swap(confirmed_, other.confirmed_);
    std::swap(is_remote_, other.is_remote_);
    std::swap(is_transient_, other.is_transient_);
}

void UpdateLatch::finish() noexcept {
    finished_ = true;
    if (below_) below_->finish();
}

void UpdateLatch::discard(std::size_t k) noexcept {
    is_worthless_[k] = true;
    if (below_) below_->discard(k);
}

/// The pin that the latch has on a page in this memory stays.
void UpdateLatch::release_page(std::size_t k) noexcept {
    Page& page = *pages_[k];
    const bool is_dirty = confirmed_ && !is_worthless_[k];
    const std::uint32_t cleared = (finished_ ? PageWord::kPending : 0) | (is_worthless_[k] ? PageWord::kDirty : 0);
    switch (locations_[k]) {
        case Location::below: {
            const bool is_stored = !is_worthless_[k] && (confirmed_ || page.load().has(PageWord::kStored));
            const std::uint32_t stored = PageWord::kStored;
            page.enter(is_stored ? PageState::stored : PageState::zero, is_stored ? stored : 0,
                       is_stored ? cleared : cleared | stored);
            break;
        }
        case Location::address:
            page.clear_flag(cleared);
            break;
        case Location::slot:
            if (is_dirty) segments_[k]->pager().impl_->drop_outdated_below(page);
            page.enter(PageState::loaded, is_dirty ? PageWord::kDirty : 0, cleared);
            break;
    }
}

UpdateLatch::~UpdateLatch() {
    below_.reset();  // first: who finds the pages free here looks for them there
    if (segments_.empty()) return;
    Pager::Impl& pager = *segments_.front()->pager().impl_;
    const bool is_kept = PageAccess::keep_for_device(*this, pager);  // first: from `loaded` on the page may be mapped
    for (std::size_t k = 0; k < pages_.size(); ++k) {
        release_page(k);
        if (!is_kept && locations_[k] != Location::below) pages_[k]->drop_pin();
    }
    if (!is_kept) pager.announce_progress();
    if (finished_) pager.rank_updated(segments_);
    if (is_transient_) pager.end_transient();
}

bool PageAccess::keep_for_device(const UpdateLatch& latch, Pager::Impl& pager) noexcept {
    InFlightUse use{pager.fence_use(), {}, {}, true};
    if (!use.event) return false;
    try {
        for (std::size_t k = 0; k < latch.pages_.size(); ++k) {
            if (latch.locations_[k] == UpdateLatch::Location::below) continue;
            const std::shared_ptr<Segment>& segment = latch.segments_[k];
            use.pages.push_back({segment, segment->index_of(*latch.pages_[k]), 1});
        }
        pager.uses.add(std::move(use));
        return true;
    } catch (const std::bad_alloc&) {
        wait_until_passed(*use.event);
        return false;
    }
}

}  // namespace torch_offload
