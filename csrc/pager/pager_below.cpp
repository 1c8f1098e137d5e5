// Updates applied in the tier below, or by the store's own process: what this memory holds of their pages goes there
// first. And what that tier holds when this one is lost.
#include "base/log.h"
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
    const std::shared_ptr<Segment> backing = segment.backing();
    if (!is_latest_below || !backing) return false;
    backing->pager().touch(backing);
    const PinGuard guard = backing->pager().pin_pages(backing, index, 1, Access::read);
    std::ranges::copy(backing->page_range(index).first(target.size()), target.begin());
    return true;
}

/// The page has newer bytes from now on than the tier below. Pre: the caller has a pin on it or has it busy, so that it
/// is not written there meanwhile.
void Pager::Impl::drop_outdated_below(const Page& page) noexcept {
    const std::shared_ptr<Segment> backing = page.segment->backing();
    if (backing) backing->pager().impl_->drop_outdated(backing->page(page.segment->index_of(page)));
}

/// Gives the memory of a page back whose bytes nobody will ask for, unless there was room for everything so far or
/// somebody has it.
void Pager::Impl::drop_outdated(Page& page) noexcept try {
    if (evictions.get() == 0) return;
    PageWord seen = page.load();
    if (next_step(PageGoal::eviction, seen, Patience::give_up, false) != PageStep::take) return;
    const Transient transient(*this);
    if (!page.change(seen, seen.with(PageState::busy))) return;
    if (seen.state() == PageState::mapped) unmap_page(page);
    drop_page(page);
} catch (const std::exception& error) {  // it stays, and goes as others do
    OFFLOAD_LOG(info, "memory of an outdated page stays: ", error.what());
}

void PageAccess::add_below(UpdateLatch& latch, std::shared_ptr<Segment> segment, Page& page) noexcept {
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

void UpdateLatch::run_remotely(RemoteWork work) {
    Segment& first = *segments_.front();
    first.pager().impl_->store->run_work(segments_, first.index_of(*pages_.front()), std::move(work));
}

/// Nothing if a page is held here at its address, or the work is too much for the store's own process; an empty latch
/// if it gave up.
std::optional<UpdateLatch> Pager::Impl::latch_below(std::span<const std::shared_ptr<Segment>> latched,
                                                    std::size_t index, Patience patience) {
    for (const std::shared_ptr<Segment>& segment : latched) {
        if (segment->page(index).load().state() == PageState::mapped) return std::nullopt;
    }
    const bool is_remote = !is_of_device();
    if (is_remote && !store->runs_work_on(latched, index)) return std::nullopt;
    UpdateLatch latch;
    PageAccess::reserve(latch, latched.size());
    for (const std::shared_ptr<Segment>& segment : latched) {
        Page& page = segment->page(index);
        if (advance(page, PageGoal::handover, patience) == Reached::nothing) {
            if (page.load().state() == PageState::mapped) return std::nullopt;
            return UpdateLatch();
        }
        PageAccess::add_below(latch, segment, page);
    }
    if (is_remote) {
        PageAccess::make_remote(latch);
        return latch;
    }
    UpdateLatch below = store->latch_for_update(latched, index, patience == Patience::wait);
    if (!below) return UpdateLatch();
    PageAccess::confirm_below(latch, std::move(below));
    return latch;
}

/// Sends down what is here of the pages, and once the store has all of them in memory, hands the work to the service
/// thread. False if it is applied here.
bool Pager::Impl::start_update_below(const std::shared_ptr<Segment>& segment, std::size_t index, UpdateTime time) {
    if (!options.updates_below) return false;
    const std::vector<std::shared_ptr<Segment>> updated = members_of(*segment);
    if (!is_of_device() && !store->runs_work_on(updated, index)) return false;
    bool is_below = true;
    for (const std::shared_ptr<Segment>& member : updated) {
        evict_page(member->page(index));
        const std::shared_ptr<Segment> backing = member->backing();
        const bool is_further_down = backing && backing->page(index).load().state() == PageState::stored;
        is_below = is_below && member->page(index).load().is_absent() && !is_further_down;
    }
    if (is_below) queue_update(segment, index, time);
    return true;
}

}  // namespace torch_offload
