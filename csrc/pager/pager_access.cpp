// Pins: from wherever a page is to mapped at its address, one named transition after another.
#include <array>

#include "base/log.h"
#include "pager/pager_guards.h"

namespace torch_offload {
namespace {

UseKind use_of(Access access) {
    switch (access) {
        case Access::read:
            return UseKind::read;
        case Access::write:
            return UseKind::write;
        case Access::overwrite:
            return UseKind::create;
    }
    throw LogicError("an access of no kind");
}

constexpr ActivityLane lane_of(StallCause cause) noexcept {
    constexpr std::array<ActivityLane, kStallCauseCount> kLanes = {
        ActivityLane::stall_read, ActivityLane::stall_memory, ActivityLane::stall_update, ActivityLane::stall_fault};
    return kLanes[static_cast<std::size_t>(cause)];
}

/// False if it is refused. Nobody uses the memory of a device that is lost.
bool can_protect(Memory& memory, std::span<std::byte> range, Protection protection) noexcept try {
    memory.protect(range, protection);
    return true;
} catch (const TierIoError&) {
    return true;
} catch (const std::exception& error) {
    OFFLOAD_LOG(warning, "the memory of a page that could not be moved: ", error.what());
    return false;
}

/// Whether a page in that state is brought into memory by such an access: overwriting brings back one that was lost.
bool is_loadable(PageWord word, Access access) noexcept {
    return word.is_absent() || (word.state() == PageState::failed && access == Access::overwrite);
}

}  // namespace

void PageAccess::hold(PinGuard& guard, std::shared_ptr<Segment> segment, std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i) segment->page(i).add_pin();
    guard.held_.push_back({std::move(segment), first, count});
}

PinGuard::~PinGuard() {
    if (held_.empty()) return;
    Pager::Impl& pager = *held_.front().segment->pager().impl_;
    pager.end_use({pager.fence_use(), std::move(held_), {}, {}});
}

void PageAccess::add_here(UpdateLatch& latch, std::shared_ptr<Segment> segment, Page& page, std::span<std::byte> bytes,
                          bool is_pinned) {
    page.add_pin();
    latch.segments_.push_back(std::move(segment));
    latch.pages_.push_back(&page);
    latch.bytes_.push_back(bytes);
    latch.locations_.push_back(is_pinned ? UpdateLatch::Location::address : UpdateLatch::Location::slot);
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
    below_.swap(other.below_);
    std::swap(finished_, other.finished_);
    std::swap(confirmed_, other.confirmed_);
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
            const bool is_stored = confirmed_ || page.load().has(PageWord::kStored);
            page.enter(is_stored ? PageState::stored : PageState::zero, is_stored ? PageWord::kStored : 0, cleared);
            break;
        }
        case Location::address:
            page.clear_flag(cleared);
            break;
        case Location::slot:
            page.enter(PageState::loaded, is_dirty ? PageWord::kDirty : 0, cleared);
            break;
    }
}

UpdateLatch::~UpdateLatch() {
    below_.reset();  // first: who finds the pages free here looks for them there
    if (segments_.empty()) return;
    Pager::Impl& pager = *segments_.front()->pager().impl_;
    InFlightUse use{pager.fence_use(), {}, {}, {}};
    for (std::size_t k = 0; k < pages_.size(); ++k) {
        if (locations_[k] == Location::below) continue;
        use.pages.push_back({segments_[k], segments_[k]->index_of(*pages_[k]), 1});
        if (locations_[k] == Location::slot) use.in_slot.push_back(pages_[k]);
    }
    if (use.event) pager.uses.add(use);  // first: from `loaded` on the page may be mapped
    for (std::size_t k = 0; k < pages_.size(); ++k) release_page(k);
    if (finished_) pager.rank_updated(segments_);
    if (!use.event) pager.close_use(use);
    if (is_transient_) pager.end_transient();
}

// --- Transitions --------------------------------------------------------------------------------------------------

ProgramWait::ProgramWait(Pager::Impl& pager, StallCause cause) noexcept
    : pager_(pager),
      is_program_(!StallClock::is_thread_ignored()),
      stall_(pager.stalls->ns[static_cast<std::size_t>(cause)], pager.options.activity_log, lane_of(cause)) {
    if (!is_program_) return;
    pager_.program_waiters.fetch_add(1, std::memory_order_acq_rel);
    pager_.service->wake();
}

ProgramWait::~ProgramWait() {
    if (is_program_) pager_.program_waiters.fetch_sub(1, std::memory_order_acq_rel);
}

std::span<std::byte> Pager::Impl::mapped_range(const Page& page) const noexcept {
    return whole_granules(page.segment->page_range(page.segment->index_of(page)));
}

/// Throws: what ends a wait early, on a thread of the program; OffloadError on one of the engine's that is to end.
void Pager::Impl::wait_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                              const InterruptibleWait& wait) const {
    while (!wait_for_change(word, seen, InterruptibleWait::kSlice)) {
        wait.check();
        OFFLOAD_CHECK(!service->is_current() || !service->is_stopping(), OffloadError, "the engine is ending");
    }
}

void Pager::Impl::wait_page(const Page& page, PageWord seen, StallCause cause) {
    const ProgramWait wait(*this, cause);
    wait_change(page.word, seen.bits, InterruptibleWait());
}

/// Absent to loading (or at once loaded, where nothing is read). Waits for memory. `own` learns of a page that is
/// undefined from now on.
void Pager::Impl::start_load(const std::shared_ptr<Segment>& segment, Page& page, Access access, Overwriting* own) {
    if (!is_loadable(page.load(), access)) return;
    const Frame frame = acquire_frame(segment->frame_bytes(segment->index_of(page)));
    const bool is_overwritten = access == Access::overwrite && own != nullptr;
    if (is_overwritten) own->add(page);
    if (load_into(segment, page, access, frame)) return;
    if (is_overwritten) own->drop(page);
    const std::lock_guard lock(mutex);
    arena.give_frame(frame);
}

/// Zeros for a page that is loading; if that fails, it owns nothing again.
void Pager::Impl::zero_frame(Page& page) {
    try {
        memory.fill_zero(page.frame.slot);
    } catch (...) {
        retire_frame(page);
        page.enter(PageState::zero);
        throw;
    }
}

/// False if somebody else was first; the frame then stays the caller's.
bool Pager::Impl::load_into(const std::shared_ptr<Segment>& segment, Page& page, Access access, const Frame& frame) {
    PageWord seen = page.load();
    do {
        if (!is_loadable(seen, access)) return false;
    } while (!page.change(seen, seen.with(PageState::loading).without_flag(PageWord::kTransferFailed)));
    if (seen.has(PageWord::kTransferFailed)) forget_error(page);
    page.frame = frame;
    if (const std::lock_guard lock(mutex); !segment->eviction_rank) rank(*segment);
    if (access == Access::overwrite) {
        page.enter(PageState::loaded, PageWord::kUndefined);
    } else if (seen.state() == PageState::zero) {
        zero_frame(page);
        page.enter(PageState::loaded);
    } else {
        moving_pages.fetch_add(1, std::memory_order_acq_rel);
        store->read(segment, page);
    }
    return true;
}

/// Loaded to mapped. False if the word was no longer `seen`.
bool Pager::Impl::map_page(Page& page, PageWord seen, Access access) {
    if (!page.change(seen, seen.with(PageState::busy))) return false;
    const bool is_writable = access != Access::read || seen.has(PageWord::kDirty);
    try {
        if (const auto update = uses.last_in_slot(page)) update->wait();
        check_idle(page.frame.slot);
        memory.move(page.frame.slot, mapped_range(page).data(),
                    is_writable ? Protection::read_write : Protection::read);
    } catch (...) {
        if (can_protect(memory, page.frame.slot, Protection::read_write)) {
            page.enter(PageState::loaded);
        } else {
            lose_page(page);
        }
        throw;
    }
    const bool is_written = access != Access::read && !seen.has(PageWord::kUndefined);
    const std::uint32_t written = is_written ? PageWord::kDirty : 0;
    page.enter(PageState::mapped, written | (is_writable ? PageWord::kWritable : 0), PageWord::kPoisoned);
    return true;
}

/// Its memory could not be moved, and cannot be used where it is. Called while that error is handled.
void Pager::Impl::lose_page(Page& page) {
    const PageWord word = page.load();
    const bool is_stored = word.has(PageWord::kStored) && !word.has(PageWord::kDirty);
    {
        const std::lock_guard lock(mutex);
        if (!is_stored) page_errors[&page] = std::current_exception();
        arena.give_up_frame(std::exchange(page.frame, Frame{}));
    }
    if (is_stored) {
        page.enter(PageState::stored, 0, PageWord::kWritable);
    } else {
        page.enter(PageState::failed, 0, PageWord::kWritable | PageWord::kDirty | PageWord::kStored);
    }
}

/// Pre: the page is busy and was mapped. Its bytes end up in its frame's slot; if this throws, it is mapped as before,
/// or, where writes to it would not be noticed any more, as one that was written to.
void Pager::Impl::unmap_page(Page& page) {
    check_idle(mapped_range(page));
    try {
        memory.move(mapped_range(page), page.frame.slot.data(), Protection::read_write);
    } catch (...) {
        const bool is_writable = page.load().has(PageWord::kWritable);
        if (can_protect(memory, mapped_range(page), is_writable ? Protection::read_write : Protection::read)) {
            page.enter(PageState::mapped);
        } else if (can_protect(memory, mapped_range(page), Protection::read_write)) {
            page.enter(PageState::mapped, PageWord::kWritable | PageWord::kDirty);
        } else {
            lose_page(page);
        }
        throw;
    }
}

/// Mapped read-only to mapped writable and dirty. False if the word was no longer `seen`.
bool Pager::Impl::make_writable(Page& page, PageWord seen) {
    if (!page.change(seen, seen.with(PageState::busy))) return false;
    try {
        memory.protect(mapped_range(page), Protection::read_write);
    } catch (...) {
        page.enter(PageState::mapped);
        throw;
    }
    page.enter(PageState::mapped, PageWord::kWritable | PageWord::kDirty);
    return true;
}

/// Pre: the caller holds a pin on the page. `own`: what its pin overwrites. Raises why a read failed that it began or
/// waited for; one that failed before is made again.
void Pager::Impl::ensure_mapped(const std::shared_ptr<Segment>& segment, std::size_t index, Access access,
                                Overwriting* own) {
    Page& page = segment->page(index);
    bool is_miss = false;
    bool was_read = false;
    while (true) {
        PageWord seen = page.load();
        if (seen.has(PageWord::kPending)) {
            const StallClock clock(own_updates);
            resolve_pending(*segment, index, true);
            continue;
        }
        if (seen.has(PageWord::kUndefined) && !(own && own->has(page))) {
            wait_page(page, seen, StallCause::update);
            continue;
        }
        switch (seen.state()) {
            case PageState::mapped:
                if (access == Access::read) return;
                if (!seen.has(PageWord::kWritable)) {
                    make_writable(page, seen);
                } else if (seen.has(PageWord::kDirty) || page.change(seen, seen.with_flag(PageWord::kDirty))) {
                    return;
                }
                break;
            case PageState::loaded:
                if (seen.has(PageWord::kPoisoning)) {
                    wait_page(page, seen, StallCause::fault);
                } else {
                    map_page(page, seen, access);
                }
                break;
            case PageState::zero:
            case PageState::stored:
                if (was_read && seen.has(PageWord::kTransferFailed)) raise_page_error(page);
                was_read = true;
                start_load(segment, page, access, own);
                break;
            case PageState::loading:
                if (!is_miss) misses.increment();
                is_miss = was_read = true;
                raise_if_late(page, seen);
                wait_page(page, seen, StallCause::read);
                break;
            case PageState::evicting:
                raise_if_late(page, seen);
                wait_page(page, seen, StallCause::memory);
                break;
            case PageState::busy:
                wait_page(page, seen, StallCause::update);
                break;
            case PageState::failed:
                if (access != Access::overwrite) raise_page_error(page);
                start_load(segment, page, access, own);
        }
    }
}

// --- Pins ---------------------------------------------------------------------------------------------------------

/// What pages could have if all others went.
std::size_t Pager::Impl::page_capacity_bytes() {
    const std::lock_guard lock(mutex);
    const ArenaUsage usage = arena.usage();
    const std::size_t elsewhere = usage.range_bytes + usage.small_bytes + usage.reserve_bytes;
    return elsewhere >= options.budget_bytes ? 0 : options.budget_bytes - elsewhere;
}

void Pager::Impl::check_fits(std::span<const PinRequest> requests) {
    std::size_t wanted_bytes = 0;
    const PinRequest* largest = nullptr;
    for (const PinRequest& request : requests) {
        wanted_bytes += whole_granules(request.segment->size_bytes());
        if (!largest || request.segment->size_bytes() > largest->segment->size_bytes()) largest = &request;
    }
    const std::size_t limit = options.budget_bytes;
    if (wanted_bytes <= limit / 4) return;  // the common case needs no lock
    std::size_t free_bytes = page_capacity_bytes();
    while (wanted_bytes > free_bytes && wait_for_oldest_use()) free_bytes = page_capacity_bytes();
    OFFLOAD_CHECK(wanted_bytes <= free_bytes, OutOfTierMemory, tier_name(), " memory tier: an operation needs ",
                  wanted_bytes, " bytes of pages at once (largest: ", largest->segment->label, ", ",
                  largest->segment->size_bytes(), " bytes), available are ", free_bytes, " of the budget of ", limit,
                  " bytes; raise ", budget_name(), options.remedy);
}

/// Starts every read that the request needs, so that they are under way together.
void Pager::Impl::start_missing(const PinRequest& request, Overwriting& own) {
    Segment& segment = *request.segment;
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        const PageWord word = segment.page(i).load();
        if (word.has(PageWord::kPending) && options.updates_below) {
            start_update_below(request.segment, i, UpdateTime::while_program_waits);
        } else if (word.has(PageWord::kPending)) {
            read_ahead_update(request.segment, i, 0, UpdateTime::while_program_waits);
        } else if (is_loadable(word, request.access)) {
            start_load(request.segment, segment.page(i), request.access, &own);
        }
    }
}

PinGuard Pager::pin(std::span<const PinRequest> requests) {
    impl_->raise_fault_error();
    impl_->check_fits(requests);
    PinGuard guard;
    Impl::Overwriting own(*impl_);  // ends before the guard: pins keep its pages
    for (const PinRequest& request : requests) {
        PageAccess::hold(guard, request.segment, 0, request.segment->page_count());
        impl_->pins.add(request.segment->page_count());
    }
    for (const PinRequest& request : requests) {
        impl_->log_use(*request.segment, 0, request.segment->page_count(), use_of(request.access));
    }
    for (const PinRequest& request : requests) impl_->start_missing(request, own);
    for (const PinRequest& request : requests) {
        for (std::size_t i = 0; i < request.segment->page_count(); ++i) {
            impl_->ensure_mapped(request.segment, i, request.access, &own);
        }
    }
    own.confirm();
    return guard;
}

PinGuard Pager::pin_pages(const std::shared_ptr<Segment>& segment, std::size_t first, std::size_t count,
                          Access access) {
    impl_->raise_fault_error();
    OFFLOAD_CHECK(first + count <= segment->page_count(), InvalidArgument, "pages ", first, " to ", first + count,
                  " of a segment of ", segment->page_count());
    PinGuard guard;
    Impl::Overwriting own(*impl_);
    PageAccess::hold(guard, segment, first, count);
    impl_->pins.add(count);
    impl_->log_use(*segment, first, count, use_of(access));
    for (std::size_t i = first; i < first + count; ++i) impl_->ensure_mapped(segment, i, access, &own);
    own.confirm();
    return guard;
}

// --- Deferred work ------------------------------------------------------------------------------------------------

bool Pager::Impl::resolve_pending(Segment& segment, std::size_t index, bool may_wait) {
    const std::shared_lock lock(pending_mutex);
    OFFLOAD_CHECK(resolve, LogicError, "page ", index, " of ", segment.label, " is pending and nobody resolves it");
    return resolve(segment, index, may_wait);
}

std::vector<std::shared_ptr<Segment>> Pager::Impl::members_of(Segment& segment) {
    const std::shared_lock lock(pending_mutex);
    return members ? members(segment) : std::vector<std::shared_ptr<Segment>>{};
}

bool Pager::Impl::set_pending(Segment& segment, std::size_t index) {
    Page& page = segment.page(index);
    while (true) {
        PageWord seen = page.load();
        if (seen.has(PageWord::kPending)) return true;
        if (seen.pin_count() != 0) {
            if (!release_faulted(segment) && !wait_for_oldest_use()) return false;
        } else if (seen.state() == PageState::busy) {
            wait_page(page, seen, StallCause::update);
        } else if (seen.state() == PageState::mapped) {
            if (!page.change(seen, seen.with(PageState::busy))) continue;
            unmap_page(page);
            page.enter(PageState::loaded, PageWord::kPending, PageWord::kWritable);
            return true;
        } else if (page.change(seen, seen.with_flag(PageWord::kPending))) {
            return true;
        }
    }
}

/// Brings one wanted page into memory and takes it for an update. Empty: gave up.
std::span<std::byte> Pager::Impl::latch_page(const std::shared_ptr<Segment>& segment, std::size_t index,
                                             Patience patience, bool& is_pinned) {
    Page& page = segment->page(index);
    const std::size_t size_bytes = segment->page_range(index).size();
    bool was_read = false;
    while (true) {
        PageWord seen = page.load();
        if (seen.has(PageWord::kUndefined)) {
            if (patience == Patience::give_up) return {};
            wait_page(page, seen, StallCause::update);
            continue;
        }
        switch (seen.state()) {
            case PageState::loaded:
                if (!page.change(seen, seen.with(PageState::busy))) break;
                is_pinned = false;
                return page.frame.slot.first(size_bytes);
            case PageState::mapped:
                if (!seen.has(PageWord::kWritable)) {
                    make_writable(page, seen);
                } else if (seen.has(PageWord::kDirty) || page.change(seen, seen.with_flag(PageWord::kDirty))) {
                    is_pinned = true;
                    return segment->page_range(index);
                }
                break;
            case PageState::zero:
            case PageState::stored:
                if (patience == Patience::give_up) return {};
                if (was_read && seen.has(PageWord::kTransferFailed)) raise_page_error(page);
                was_read = true;
                start_load(segment, page, Access::read);
                break;
            case PageState::loading:
                was_read = true;
                raise_if_late(page, seen);
                wait_page(page, seen, StallCause::read);
                break;
            case PageState::evicting:
                raise_if_late(page, seen);
                wait_page(page, seen, StallCause::memory);
                break;
            case PageState::busy:
                wait_page(page, seen, StallCause::memory);
                break;
            case PageState::failed:
                raise_page_error(page);
        }
    }
}

/// Deferred work on the segment has begun or ended: it will be used at another time now.
void Pager::Impl::rank_updated(std::span<const std::shared_ptr<Segment>> updated) {
    rank_again(updated);
    for (const std::shared_ptr<Segment>& segment : updated) store->note_pending(*segment);
}

bool Pager::set_pending(Segment& segment, std::size_t index) {
    const bool is_marked = impl_->set_pending(segment, index);
    if (!is_marked || index + 1 != segment.page_count()) return is_marked;
    {
        const std::lock_guard lock(impl_->mutex);
        if (segment.eviction_rank) impl_->rank(segment);
    }
    impl_->store->note_pending(segment);
    return true;
}

UpdateLatch Pager::Impl::latch_here(std::span<const std::shared_ptr<Segment>> latched, std::size_t index,
                                    Patience patience) {
    std::optional<Transient> transient;
    if (patience == Patience::give_up) transient.emplace(*this);
    PinGuard wanted;
    for (const std::shared_ptr<Segment>& segment : latched) PageAccess::hold(wanted, segment, index, 1);
    if (patience == Patience::wait) {
        for (const auto& segment : latched) start_load(segment, segment->page(index), Access::read);
    }
    UpdateLatch latch;
    for (const std::shared_ptr<Segment>& segment : latched) {
        bool is_pinned = false;
        const auto bytes = latch_page(segment, index, patience, is_pinned);
        if (bytes.empty()) return {};
        PageAccess::add_here(latch, segment, segment->page(index), bytes, is_pinned);
    }
    PageAccess::confirm(latch, std::move(transient));
    for (const std::shared_ptr<Segment>& segment : latched) log_use(*segment, index, 1, UseKind::write);
    return latch;
}

UpdateLatch Pager::latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                    bool may_wait) {
    const Patience patience = may_wait ? Patience::wait : Patience::give_up;
    if (options_.updates_below) {
        std::optional<UpdateLatch> latch = impl_->latch_below(segments, index, patience);
        if (latch) return std::move(*latch);
    }
    return impl_->latch_here(segments, index, patience);
}

bool Pager::in_memory(const Segment& segment, std::size_t index) noexcept {
    return segment.page(index).load().in_memory();
}

}  // namespace torch_offload
