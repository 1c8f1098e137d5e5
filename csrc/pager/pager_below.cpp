// Updates applied in the tier below: what this memory holds of their pages goes down first. And what that tier holds
// when this one is lost.
#include "pager/pager_guards.h"

namespace torch_offload {

bool Pager::salvage(Segment& segment, std::size_t index, std::span<std::byte> target) {
    const PageWord word = segment.page(index).load();
    if (word.has(PageWord::kPending) || word.state() == PageState::busy || word.state() == PageState::evicting) {
        return false;
    }
    if (word.state() == PageState::zero) {
        std::ranges::fill(target, std::byte{0});
        return true;
    }
    const bool is_latest_below = word.has(PageWord::kStored) && !word.has(PageWord::kDirty);
    return is_latest_below && impl_->store->copy_out(segment, index, target);
}

void PageAccess::add_below(UpdateLatch& latch, std::shared_ptr<Segment> segment, Page& page) {
    latch.segments_.push_back(std::move(segment));
    latch.pages_.push_back(&page);
    latch.locations_.push_back(UpdateLatch::Location::below);
    latch.is_worthless_.push_back(false);
}

void PageAccess::confirm_below(UpdateLatch& latch, UpdateLatch below) {
    latch.bytes_ = below.bytes_;
    latch.below_ = std::make_unique<UpdateLatch>(std::move(below));
    latch.confirmed_ = true;
}

/// Leaves the page busy and without a frame, its bytes in the store. It is pending, so that pins on it only say that it
/// is wanted; one that is mapped all the same is held by somebody who has its address.
Pager::Impl::SentDown Pager::Impl::send_down(const std::shared_ptr<Segment>& segment, std::size_t index,
                                             Patience patience) {
    Page& page = segment->page(index);
    while (true) {
        PageWord seen = page.load();
        if (seen.has(PageWord::kUndefined)) {
            if (patience == Patience::give_up) return SentDown::not_yet;
            wait_page(page, seen, StallCause::update);
            continue;
        }
        switch (seen.state()) {
            case PageState::zero:
            case PageState::stored:
                if (page.change(seen, seen.with(PageState::busy))) return SentDown::done;
                break;
            case PageState::loaded:
                if (!page.change(seen, seen.with(PageState::busy))) break;
                if (seen.has(PageWord::kDirty)) {
                    drop_or_write(page, segment);
                    break;
                }
                retire_frame(page);
                announce_progress();
                return SentDown::done;
            case PageState::mapped:
                return SentDown::is_held;
            case PageState::loading:
            case PageState::evicting:
            case PageState::busy:
                if (patience == Patience::give_up) return SentDown::not_yet;
                wait_page(page, seen, StallCause::memory);
                break;
            case PageState::failed:
                raise_page_error(page);
        }
    }
}

/// Nothing if a page is held here at its address; an empty latch if it gave up.
std::optional<UpdateLatch> Pager::Impl::latch_below(std::span<const std::shared_ptr<Segment>> latched,
                                                    std::size_t index, Patience patience) {
    for (const std::shared_ptr<Segment>& segment : latched) {
        if (segment->page(index).load().state() == PageState::mapped) return std::nullopt;
    }
    UpdateLatch latch;
    for (const std::shared_ptr<Segment>& segment : latched) {
        switch (send_down(segment, index, patience)) {
            case SentDown::done:
                PageAccess::add_below(latch, segment, segment->page(index));
                break;
            case SentDown::not_yet:
                return UpdateLatch();
            case SentDown::is_held:
                return std::nullopt;
        }
    }
    UpdateLatch below = store->latch_for_update(latched, index, patience == Patience::wait);
    if (!below) return UpdateLatch();
    PageAccess::confirm_below(latch, std::move(below));
    return latch;
}

/// Sends down what is here of the pages, and once the store has all of them in memory, hands the work to the service
/// thread.
void Pager::Impl::start_update_below(const std::shared_ptr<Segment>& segment, std::size_t index, UpdateTime time) {
    const std::vector<std::shared_ptr<Segment>> updated = members_of(*segment);
    bool is_here = false;
    for (const std::shared_ptr<Segment>& member : updated) {
        evict_page(member->page(index), member);
        is_here = is_here || !member->page(index).load().is_absent();
    }
    if (!is_here && store->has_in_memory(updated, index)) queue_update(segment, index, time);
}

}  // namespace torch_offload
