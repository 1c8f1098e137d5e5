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
        ActivityLane::stall_read, ActivityLane::stall_memory, ActivityLane::stall_update, ActivityLane::stall_fault,
        ActivityLane::stall_network};
    return kLanes[static_cast<std::size_t>(cause)];
}

PageGoal goal_of(Access access) {
    switch (access) {
        case Access::read:
            return PageGoal::read;
        case Access::write:
            return PageGoal::write;
        case Access::overwrite:
            return PageGoal::overwrite;
    }
    throw LogicError("an access of no kind");
}

/// What a thread waits for that waits for the page.
StallCause cause_of(PageWord word) noexcept {
    if (word.has(PageWord::kPoisoning)) return StallCause::fault;
    if (word.state() == PageState::loading) return StallCause::read;
    return word.state() == PageState::evicting ? StallCause::memory : StallCause::update;
}

}  // namespace

// --- Waits --------------------------------------------------------------------------------------------------------

ProgramWait::ProgramWait(Pager::Impl& pager, StallCause cause, const Page* page) noexcept
    : pager_(pager),
      is_program_(!StallClock::is_thread_ignored()),
      stall_(pager.stalls->ns[static_cast<std::size_t>(cause)], pager.options.activity_log, lane_of(cause)),
      listed_(pager.waits, cause, page) {
    if (!is_program_) return;
    pager_.program_waiters.fetch_add(1, std::memory_order_acq_rel);
    pager_.service->wake();
}

ProgramWait::~ProgramWait() {
    if (is_program_) pager_.program_waiters.fetch_sub(1, std::memory_order_acq_rel);
}

void Pager::Impl::wait_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                              const InterruptibleWait& wait) {
    while (!wait_slice(word, seen, wait, InterruptibleWait::kSlice)) {
    }
}

/// False if nothing has changed. Throws: what ends a wait early, on a thread of the program; OffloadError on one of the
/// engine's that is to end.
bool Pager::Impl::wait_slice(const std::atomic<std::uint32_t>& word, std::uint32_t seen, const InterruptibleWait& wait,
                             std::chrono::milliseconds limit) {
    {
        const PinTally::Wait waits(tally, word, seen);
        if (wait_for_change(word, seen, limit)) return true;
    }
    wait.check();
    OFFLOAD_CHECK(!service->is_current() || !service->is_stopping(), OffloadError, "the engine is ending");
    return false;
}

/// Throws: why, if it is a transfer that is late.
void Pager::Impl::wait_for_others(const Page& page, PageWord seen) {
    if (seen.state() == PageState::loading || seen.state() == PageState::evicting) raise_if_late(page, seen);
    const ProgramWait wait(*this, cause_of(seen), &page);
    wait_change(page.word, seen.bits, InterruptibleWait());
}

// --- The way of a page --------------------------------------------------------------------------------------------

/// Brings the page where the goal says, one step after another. Pre: the caller owns its segment, and but for eviction
/// and deferral has a pin on it. `own`: what the caller's pin overwrites. Raises why a read failed that it began or
/// waited for; one that failed before is made again.
Pager::Impl::Reached Pager::Impl::advance(Page& page, PageGoal goal, Patience patience, Overwriting* own) {
    bool was_read = false;
    bool was_written = false;
    bool is_miss = false;
    while (true) {
        PageWord seen = page.load();
        const bool is_own = seen.has(PageWord::kUndefined) && own && own->has(page);
        switch (next_step(goal, seen, patience, is_own)) {
            case PageStep::finish:
                return Reached::place;
            case PageStep::leave:
                return Reached::nothing;
            case PageStep::mark:
                if (!page.change(seen, marked(goal, seen))) break;
                if (goal != PageGoal::deferral) drop_outdated_below(page);
                return Reached::place;
            case PageStep::take:
                if (goal == PageGoal::handover && seen.has(PageWord::kDirty) && std::exchange(was_written, true)) {
                    raise_write_error(page.segment);  // else this would try for as long as it fails
                }
                if (page.change(seen, seen.with(PageState::busy)) && move_on(page, seen, goal)) return Reached::end;
                break;
            case PageStep::load:
                if (was_read && seen.has(PageWord::kTransferFailed)) raise_page_error(page);
                was_read = true;
                start_load(page, goal, own);
                break;
            case PageStep::settle: {
                const StallClock clock(own_updates);
                resolve_pending(*page.segment, page.segment->index_of(page), true);
                break;
            }
            case PageStep::wait:
                if (seen.state() == PageState::loading) {
                    if (is_access(goal) && !std::exchange(is_miss, true)) misses.increment();
                    was_read = true;
                }
                wait_for_others(page, seen);
                break;
            case PageStep::raise:
                raise_page_error(page);
                break;
        }
    }
}

/// Pre: the page is busy and was as `before` says. False if that only brought it nearer: its word is to be looked at
/// again.
bool Pager::Impl::move_on(Page& page, PageWord before, PageGoal goal) {
    const bool was_mapped = before.state() == PageState::mapped;
    switch (goal) {
        case PageGoal::read:
        case PageGoal::write:
        case PageGoal::overwrite:
            if (was_mapped) {
                make_writable(page);
            } else {
                map_page(page, before, goal != PageGoal::read);
            }
            return false;
        case PageGoal::update:
            if (was_mapped) make_writable(page);
            return !was_mapped;
        case PageGoal::handover:
            if (before.is_absent()) return true;
            if (before.has(PageWord::kDirty)) {
                drop_or_write(page);
                return false;
            }
            retire_frame(page);
            announce_progress();
            return true;
        case PageGoal::eviction:
            if (was_mapped) unmap_page(page);
            drop_or_write(page);
            return true;
        case PageGoal::deferral:
            unmap_page(page);
            page.enter(PageState::loaded, PageWord::kPending, PageWord::kWritable);
            return true;
    }
    return false;
}

// --- Pins ---------------------------------------------------------------------------------------------------------

/// What pages could have if all others went.
std::size_t Pager::Impl::page_capacity_bytes() {
    const std::lock_guard lock(mutex);
    const ArenaUsage usage = arena.usage();
    const std::size_t elsewhere = usage.range_bytes + usage.small_bytes + usage.reserve_bytes;
    const std::size_t limit = std::max(options.budget_bytes, usage.limit_bytes);  // of a share, at least its part
    return elsewhere >= limit ? 0 : limit - elsewhere;
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
    while (wanted_bytes > free_bytes && (lease(wanted_bytes - free_bytes) > 0 || wait_for_oldest_use())) {
        free_bytes = page_capacity_bytes();
    }
    OFFLOAD_CHECK(wanted_bytes <= free_bytes, OutOfTierMemory, tier_name(), " memory tier: an operation needs ",
                  wanted_bytes, " bytes of pages at once (largest: ", largest->segment->label, ", ",
                  largest->segment->size_bytes(), " bytes), available are ", free_bytes, " of the budget of ", limit,
                  " bytes; raise ", budget_name(), options.remedy);
}

/// Starts every read that a pin needs, so that they are under way together.
void Pager::Impl::start_missing(const std::shared_ptr<Segment>& segment, PageRange pages, Access access,
                                Overwriting& own) {
    const PageGoal goal = goal_of(access);
    for (std::size_t i = pages.first; i < pages.first + pages.count; ++i) {
        Page& page = segment->page(i);
        const PageWord word = page.load();
        if (word.has(PageWord::kPending) && options.updates_below) {
            start_update_below(segment, i, UpdateTime::while_program_waits);
        } else if (word.has(PageWord::kPending)) {
            read_ahead_update(segment, i, 0, UpdateTime::while_program_waits);
        } else if (next_step(goal, word, Patience::wait, false) == PageStep::load) {
            start_load(page, goal, &own);
        }
    }
}

/// Pre: start_missing().
void Pager::Impl::map_pages(Segment& segment, PageRange pages, Access access, Overwriting& own) {
    const PageGoal goal = goal_of(access);
    for (std::size_t i = pages.first; i < pages.first + pages.count; ++i) {
        Page& page = segment.page(i);
        if (next_step(goal, page.load(), Patience::wait, false) == PageStep::finish) continue;  // the usual case
        advance(page, goal, Patience::wait, &own);
    }
    if (options.device) uses.order_after_updates(*options.device, segment, pages);
}

PinGuard Pager::pin(std::span<const PinRequest> requests) {
    impl_->raise_fault_error();
    impl_->check_fits(requests);
    PinGuard guard;
    Impl::Overwriting own(*impl_);  // ends before the guard: pins keep its pages
    const auto all_of = [](const PinRequest& request) { return PageRange{0, request.segment->page_count()}; };
    std::size_t page_count = 0;
    for (const PinRequest& request : requests) page_count += request.segment->page_count();
    PageAccess::begin(guard, impl_->tally, page_count);
    for (const PinRequest& request : requests) {
        PageAccess::hold(guard, request.segment, 0, request.segment->page_count());
    }
    for (const PinRequest& request : requests) {
        impl_->log_use(*request.segment, 0, request.segment->page_count(), use_of(request.access));
    }
    for (const PinRequest& request : requests) {
        impl_->start_missing(request.segment, all_of(request), request.access, own);
    }
    for (const PinRequest& request : requests) {
        impl_->map_pages(*request.segment, all_of(request), request.access, own);
    }
    own.confirm();
    return guard;
}

PinGuard Pager::pin_pages(const std::shared_ptr<Segment>& segment, std::size_t first, std::size_t count,
                          Access access) {
    const PageRange pages{first, count};
    return pin_ranges(segment, {&pages, 1}, access);
}

PinGuard Pager::pin_ranges(const std::shared_ptr<Segment>& segment, std::span<const PageRange> ranges, Access access) {
    impl_->raise_fault_error();
    std::size_t page_count = 0;
    for (const PageRange& pages : ranges) {
        OFFLOAD_CHECK(pages.first + pages.count <= segment->page_count(), InvalidArgument, "pages ", pages.first,
                      " to ", pages.first + pages.count, " of a segment of ", segment->page_count());
        page_count += pages.count;
    }
    PinGuard guard;
    Impl::Overwriting own(*impl_);
    PageAccess::begin(guard, impl_->tally, page_count);
    for (const PageRange& pages : ranges) PageAccess::hold(guard, segment, pages.first, pages.count);
    for (const PageRange& pages : ranges) impl_->log_use(*segment, pages.first, pages.count, use_of(access));
    for (const PageRange& pages : ranges) impl_->start_missing(segment, pages, access, own);
    for (const PageRange& pages : ranges) impl_->map_pages(*segment, pages, access, own);
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
    if (segment.has_work_above()) return updated_above(segment);
    const std::shared_lock lock(pending_mutex);
    return members ? members(segment) : std::vector<std::shared_ptr<Segment>>{};
}

/// Deferred work on the segments has begun or ended: they are used at another time now, here and in the tier below.
void Pager::Impl::rank_updated(std::span<const std::shared_ptr<Segment>> updated) {
    rank_again(updated);
    for (const std::shared_ptr<Segment>& segment : updated) {
        const std::shared_ptr<Segment> backing = segment->backing();
        if (backing) backing->pager().impl_->rank_again({&backing, 1});
    }
}

bool Pager::set_pending(Segment& segment, std::size_t index) {
    Page& page = segment.page(index);
    while (impl_->advance(page, PageGoal::deferral, Patience::wait) == Impl::Reached::nothing) {
        if (!impl_->release_faulted(segment) && !impl_->wait_for_oldest_use()) return false;
    }
    if (index + 1 != segment.worked_pages()) return true;
    const std::shared_ptr<Segment> deferred = segment.shared_from_this();
    impl_->rank_updated({&deferred, 1});
    return true;
}

UpdateLatch Pager::Impl::latch_here(std::span<const std::shared_ptr<Segment>> latched, std::size_t index,
                                    Patience patience) {
    std::optional<Transient> transient;
    if (patience == Patience::give_up) transient.emplace(*this);
    PinGuard wanted;
    for (const std::shared_ptr<Segment>& segment : latched) PageAccess::hold(wanted, segment, index, 1);
    if (patience == Patience::wait) {
        for (const auto& segment : latched) start_load(segment->page(index), PageGoal::update);
    }
    UpdateLatch latch;
    PageAccess::reserve(latch, latched.size());
    if (patience == Patience::wait) PageAccess::begin(latch, tally, latched.size());
    for (const std::shared_ptr<Segment>& segment : latched) {
        const Reached reached = advance(segment->page(index), PageGoal::update, patience);
        if (reached == Reached::nothing) return {};
        PageAccess::add_here(latch, segment, segment->page(index), reached == Reached::place);
        if (options.device) uses.order_after_updates(*options.device, *segment, {index, 1});
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
