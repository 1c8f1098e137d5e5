// Accesses behind the dispatcher: from the signal handler to a page at its address, or to bytes that let them end.
#include <algorithm>

#include "base/log.h"
#include "pager/pager_guards.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxBehindFault = 8;  // pages

}  // namespace

/// Runs in the SIGSEGV handler: atomics, a semaphore and futex waits only.
void Pager::Impl::answer_fault(Page& page, bool is_write) noexcept {
    faults.increment();
    const ProgramWait wait(*this, StallCause::fault, &page);
    const PinTally::Fault fault(tally);
    while (true) {
        const PageWord seen = page.load();
        const bool is_mapped = seen.state() == PageState::mapped && (!is_write || seen.has(PageWord::kWritable));
        if (is_mapped || seen.has(PageWord::kPoisoned)) return;
        if (service->is_current()) {
            // The thread that answers faults cannot wait for itself: a defect, ended rather than hung.
            memory.poison(mapped_range(page));
            page.set_flag(PageWord::kPoisoned);
            return;
        }
        // In one change with the look above: what has been served since is not asked for again.
        const std::uint32_t asked = PageWord::kFaulted | (is_write ? PageWord::kFaultedWrite : 0);
        if ((seen.bits & asked) == asked) {
            page.wait_change(seen);
        } else if (PageWord expected = seen; page.change(expected, seen.with_flag(asked))) {
            if (!seen.has(PageWord::kFaulted)) service->push_fault(page);
        }
    }
}

/// Maps the page for a thread that waits in the handler; if that fails twice, lets the access end on 0xFF bytes.
void Pager::Impl::serve_fault(Page& page) {
    std::shared_ptr<Segment> segment;
    {
        const std::lock_guard lock(mutex);
        if (const auto found = segments.find(page.segment); found != segments.end()) segment = found->second.lock();
    }
    for (int attempt = 0;; ++attempt) {
        try {
            OFFLOAD_CHECK(segment, LogicError, "access to a segment that is going away");
            {
                PinGuard guard;
                const std::size_t index = segment->index_of(page);
                PageAccess::hold(guard, segment, index, 1);
                const PageGoal goal = page.load().has(PageWord::kFaultedWrite) ? PageGoal::write : PageGoal::read;
                start_from_fault(segment, index, goal);
                advance(page, goal, Patience::wait);
                hold_faulted(page);
            }  // Pager::evict waits for what follows: the pin is gone by then
            page.clear_flag(PageWord::kFaulted | PageWord::kFaultedWrite);
            return;
        } catch (const std::exception& error) {
            if (attempt == 0 && segment && page.load().state() != PageState::failed) continue;
            OFFLOAD_LOG(error, "an access behind the dispatcher could not be served: ", error.what());
            poison_page(page, std::current_exception(), error.what());
            return;
        }
    }
}

/// Begins to read the page and, where accesses seem to go forwards, as many behind it as are read ahead elsewhere.
void Pager::Impl::start_from_fault(const std::shared_ptr<Segment>& segment, std::size_t index, PageGoal goal) {
    Page& page = segment->page(index);
    if (const PageWord word = page.load(); word.state() == PageState::stored && !word.has(PageWord::kPending)) {
        start_load(page, goal, nullptr);
    }
    if (index > 0 && segment->page(index - 1).load().state() != PageState::mapped) return;
    const std::size_t end = std::min(segment->page_count(), index + 1 + kMaxBehindFault);
    try {
        for (std::size_t i = index + 1; i < end; ++i) owner.prefetch_page(segment, i);
    } catch (const std::exception& error) {  // whoever needs the page meets it again
        OFFLOAD_LOG(info, "reading behind an access failed: ", error.what());
    }
}

void Pager::Impl::hold_faulted(Page& page) noexcept {
    const std::lock_guard lock(mutex);
    fault_holds.add(page);
}

/// For who would run out of memory otherwise. False if there are none.
bool Pager::Impl::release_faulted() noexcept {
    const std::lock_guard lock(mutex);
    return fault_holds.drop_older_half();
}

bool Pager::Impl::release_faulted(const Segment& segment) noexcept {
    const std::lock_guard lock(mutex);
    return fault_holds.drop(segment);
}

/// Lets accesses to the page end on 0xFF bytes, unless somebody has mapped it meanwhile, and has the program told of
/// the error: the thread that waits finds it raised at its next step. Keeps the page from being mapped first: what lies
/// at its address then is nobody's. Its state may change all the same: a transfer may have no end. Called while the
/// error is handled.
void Pager::Impl::poison_page(Page& page, std::exception_ptr error, const char* why) noexcept {
    constexpr std::uint32_t kServed = PageWord::kFaulted | PageWord::kFaultedWrite;
    PageWord seen = page.load();
    while (true) {
        const PageState state = seen.state();
        if (state == PageState::mapped && (seen.has(PageWord::kWritable) || !seen.has(PageWord::kFaultedWrite))) {
            page.clear_flag(kServed);
            return;
        }
        if (state == PageState::busy) {
            page.wait_change(seen);
            seen = page.load();
        } else if (state == PageState::mapped) {  // it could not be made writable; its memory goes with its address
            if (!page.change(seen, seen.with(PageState::busy).with_flag(PageWord::kPoisoning))) continue;
            lose_page(page, why);
            break;
        } else if (page.change(seen, seen.with_flag(PageWord::kPoisoning))) {
            break;
        }
    }
    fault_errors.keep(std::move(error));
    announce_progress();
    memory.poison(mapped_range(page));
    fault_errors.tell();
    page.set_flag(PageWord::kPoisoned);
    page.clear_flag(kServed | PageWord::kPoisoning);
    fault_errors.marked();
}

/// Takes the 0xFF bytes away that accesses ended on, once their error is raised: later accesses are served again. Those
/// of a page that somebody has go when the next error is raised, or when it is mapped.
void Pager::Impl::clear_poison() {
    std::vector<std::shared_ptr<Segment>> all;  // outlives the lock: their end takes it
    {
        const std::lock_guard lock(mutex);
        all.reserve(segments.size());
        for (const auto& [address, segment] : segments) all.push_back(segment.lock());
    }
    for (const std::shared_ptr<Segment>& segment : all) {
        for (std::size_t i = 0; segment && i < segment->page_count(); ++i) clear_poison(segment->page(i));
    }
}

/// Unless somebody has the page.
void Pager::Impl::clear_poison(Page& page) {
    PageWord seen = page.load();
    while (seen.has(PageWord::kPoisoned)) {
        const bool is_free = seen.is_absent() || seen.state() == PageState::loaded || seen.state() == PageState::failed;
        if (!is_free) return;
        if (!page.change(seen, seen.with(PageState::busy))) continue;
        try {
            memory.decommit(mapped_range(page));
        } catch (...) {
            page.enter(seen.state());
            throw;
        }
        page.enter(seen.state(), 0, PageWord::kPoisoned);
    }
}

}  // namespace torch_offload
