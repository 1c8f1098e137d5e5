// Getting memory: take it if the budget has it, else evict and wait.
#include <algorithm>
#include <functional>
#include <utility>

#include "base/log.h"
#include "base/units.h"
#include "pager/pager_guards.h"
#include "pager/shared_budget.h"

namespace torch_offload {
namespace {

/// Who lets pages go says so, but a thread is still counted for a moment after that, and one that begins to wait itself
/// says nothing.
constexpr std::chrono::milliseconds kOperatorSlice{10};

/// A thread that waits for memory.
class MemoryWait {
public:
    explicit MemoryWait(Pager::Impl& pager)
        : pager_(pager), pause_(pager.memory_waiters), wait_(pager, StallCause::memory) {}

    /// Waits a little for what other threads hold for a moment. False once that has been tried for too long.
    bool wait_for_operators(std::uint32_t seen) {
        const std::int64_t now_ns = steady_ns();
        if (!operators_since_ns_) operators_since_ns_ = now_ns;
        if (std::chrono::nanoseconds(now_ns - *operators_since_ns_) > pager_.options.longest_operator) return false;
        pager_.wait_slice(pager_.progress, seen, interrupt_, kOperatorSlice);
        return true;
    }

private:
    Pager::Impl& pager_;
    ReadAheadPause pause_;
    ProgramWait wait_;
    InterruptibleWait interrupt_;
    std::optional<std::int64_t> operators_since_ns_;
};

}  // namespace

void Pager::Impl::announce_progress() noexcept {
    progress.fetch_add(1, std::memory_order_acq_rel);
    wake_all(progress);
}

/// Announced before and after for the same reason as end_move().
void Pager::Impl::end_transient() noexcept {
    announce_progress();
    transients.fetch_sub(1, std::memory_order_acq_rel);
    announce_progress();
}

/// Takes memory with `take` (called with the lock), evicting and waiting until it succeeds. `available` says how much
/// of it could be had without evicting a page. Raises where nothing is on its way and nobody else lets anything go.
template <typename Take, typename Available>
auto Pager::Impl::acquire(std::size_t size_bytes, Take take, Available available) {
    std::optional<MemoryWait> wait;
    bool are_resting_tried = false;
    while (true) {
        close_passed_uses();
        const std::uint32_t seen = progress.load(std::memory_order_acquire);
        std::size_t available_bytes = 0;
        bool is_changing = false;  // other threads have the system's calls make memory, or give it back
        {
            MemoryLock lock(*this);
            if (auto taken = take(lock)) return taken;
            available_bytes = std::invoke(available, arena.usage());
            is_changing = arena.is_changing();
            // Free frames that the I/O engine has registered: what was not has been given back by `take`.
            if (available_bytes >= size_bytes && !is_changing) unregister_wanted_bytes = size_bytes;
        }
        bool is_expected = available_bytes >= size_bytes;
        if (is_expected) {
            store->kick();
        } else {
            const std::size_t expected_bytes = available_bytes + evicting_bytes.load(std::memory_order_acquire);
            const std::size_t missing_bytes = size_bytes - std::min(size_bytes, expected_bytes);
            if (lease(missing_bytes) > 0) continue;
            is_expected = missing_bytes == 0 || evict_for(missing_bytes, 0) > 0;
        }
        if (!is_expected && !is_changing && !is_anything_moving() && transients.load(std::memory_order_acquire) == 0 &&
            progress.load(std::memory_order_acquire) == seen) {
            if (wait_for_oldest_use() || release_faulted()) continue;
            if (!std::exchange(are_resting_tried, true) && evict_for(size_bytes, 0, Resting::too) > 0) continue;
            if (size_bytes <= options.budget_bytes) {  // a working disk would make room
                raise_write_error();
                raise_late_error();
                if (tally.has_others() || (shared && shared->is_entitled())) {
                    if (!wait) wait.emplace(*this);
                    if (wait->wait_for_operators(seen)) continue;
                }
            }
            raise_out_of_memory(size_bytes);
        }
        if (!wait) wait.emplace(*this);
        wait_change(progress, seen, InterruptibleWait());
    }
}

/// More memory of a budget that other processes have a share of, before a page has to leave. Returns how much came.
std::size_t Pager::Impl::lease(std::size_t size_bytes) noexcept { return shared ? shared->lease(size_bytes) : 0; }

Frame Pager::Impl::acquire_frame(std::size_t size_bytes) {
    return *acquire(
        size_bytes, [&](ArenaLock& lock) { return arena.try_take_frame(size_bytes, lock); },
        &ArenaUsage::available_bytes);
}

std::span<std::byte> Pager::Impl::acquire_range(std::size_t size_bytes) {
    return *acquire(
        size_bytes, [&](ArenaLock& lock) { return arena.try_take_range(size_bytes, lock); },
        &ArenaUsage::available_bytes);
}

void Pager::Impl::acquire_small(std::size_t size_bytes) {
    acquire(
        size_bytes, [&](ArenaLock& lock) { return arena.try_count_small(size_bytes, lock); },
        &ArenaUsage::available_small_bytes);
}

/// Takes a frame for a read ahead of use if that leaves the spare memory, to which only demand is entitled, or if pages
/// used at `keep_before` or later can make up for it without a write. Never competes with a thread that waits.
std::optional<Frame> Pager::Impl::try_acquire_frame(std::size_t size_bytes, UsePosition keep_before) {
    const std::size_t wanted_bytes = size_bytes + spare_bytes();
    for (int attempt = 0; attempt < 2; ++attempt) {
        if (memory_waiters.load(std::memory_order_acquire) + flushers.load(std::memory_order_acquire) != 0) break;
        std::size_t available_bytes = 0;
        {
            MemoryLock lock(*this);
            available_bytes = arena.usage().available_bytes();
            if (available_bytes >= wanted_bytes) return arena.try_take_frame(size_bytes, lock);
        }
        const std::size_t expected_bytes = available_bytes + evicting_bytes.load(std::memory_order_acquire);
        if (expected_bytes >= wanted_bytes) break;
        const std::size_t missing_bytes = wanted_bytes - expected_bytes;
        if (lease(missing_bytes) == 0 && evict_for(missing_bytes, keep_before) == 0) break;
    }
    return std::nullopt;
}

/// Pages that lie in files of somebody else's have no frame before they are read, and the system takes about as long to
/// clear new memory as the disk to fill it. So that is done while nothing moves, for one frame at each look ahead.
void Pager::Impl::make_frame_ahead() {
    const std::size_t home_bytes = store->status().home_bytes;
    if (home_bytes == 0 || is_anything_moving()) return;
    const std::size_t kept_bytes = spare_bytes();
    {
        MemoryLock lock(*this);
        const ArenaUsage usage = arena.usage();
        if (usage.frame_bytes + usage.free_frame_bytes >= home_bytes) return;
        if (!arena.add_free_frame(kept_bytes, lock)) return;
    }
    store->kick();
}

/// Unpinned pages in memory, furthest next use first, at least `wanted_bytes` if there are as many that are used at
/// `keep_before` or later. Of one segment the last page goes first: the first is needed first. Pages whose last write
/// failed a moment ago only as `resting` says; none that would have to be written to a disk that does not answer.
std::vector<Pager::Impl::Victim> Pager::Impl::choose_victims(std::size_t wanted_bytes, UsePosition keep_before,
                                                             Resting resting) {
    std::vector<Victim> victims;  // outlives the lock: the last owner of a segment takes it
    std::size_t chosen_bytes = 0;
    const std::int64_t now_ns = steady_ns();
    const bool may_write = late_pages.load(std::memory_order_acquire) == 0;  // the disk answers
    const std::lock_guard lock(mutex);
    for (auto entry = evictable.begin(); entry != evictable.end() && chosen_bytes < wanted_bytes;) {
        Segment& segment = *entry->segment;
        if (entry->rank.next_use < keep_before) break;
        ++entry;
        if (segment.stays) continue;
        bool has_pages = false;
        for (std::size_t i = segment.page_count(); i-- > 0 && chosen_bytes < wanted_bytes;) {
            const PageWord word = segment.page(i).load();
            has_pages = has_pages || !(word.is_absent() || word.state() == PageState::failed);
            if (!word.in_memory() || word.pin_count() != 0) continue;
            if (!may_write && word.has(PageWord::kDirty)) continue;
            if (resting == Resting::not_yet && unwritable.is_resting(segment.page(i), now_ns)) continue;
            Victim& victim = victims.emplace_back();  // first: while nothing is owned this may fail
            victim = {segments.at(&segment).lock(), &segment.page(i)};
            if (!victim.segment) {
                victims.pop_back();
                break;
            }
            chosen_bytes += segment.frame_bytes(i);
        }
        if (!has_pages) evictable.remove(segment);
    }
    return victims;
}

/// Starts pages on their way out, at least `wanted_bytes` if there are as many; returns the bytes of those that went.
std::size_t Pager::Impl::evict_for(std::size_t wanted_bytes, UsePosition keep_before, Resting resting) {
    close_passed_uses();
    rank_used_above();
    std::size_t evicted_bytes = 0;
    for (const Victim& victim : choose_victims(wanted_bytes, keep_before, resting)) {
        const std::size_t size_bytes = victim.segment->frame_bytes(victim.segment->index_of(*victim.page));
        if (evict_page(*victim.page)) evicted_bytes += size_bytes;
    }
    return evicted_bytes;
}

/// False if the page is pinned, on its way already, or not in memory.
bool Pager::Impl::evict_page(Page& page) {
    const Transient transient(*this);
    return advance(page, PageGoal::eviction, Patience::give_up) != Reached::nothing;
}

/// A copy that has not passed where memory is used is a defect, found by devices that can tell.
void Pager::Impl::check_idle(std::span<const std::byte> memory) noexcept {
    if (!options.device) return;
    try {
        options.device->check_idle(memory);
    } catch (const std::exception&) {
        fault_errors.keep(std::current_exception());
        fault_errors.tell();
    }
}

/// Pre: the page's bytes lie in its frame's slot, and nobody needs them there any more.
void Pager::Impl::retire_frame(Page& page) noexcept {
    if (options.device) {
        check_idle(page.frame.slot);
        options.device->poison(page.frame.slot);
    }
    MemoryLock lock(*this);
    unwritable.remove(page);
    arena.give_frame(std::exchange(page.frame, Frame{}), lock);
}

void Pager::Impl::raise_out_of_memory(std::size_t wanted_bytes) {
    const std::lock_guard lock(mutex);
    const ArenaUsage usage = arena.usage();
    throw OutOfTierMemory(concat(tier_name(), " memory tier: ", wanted_bytes, " more bytes do not fit the budget of ",
                                 usage.limit_bytes, " bytes: ", usage.frame_bytes, " in pages that have to stay, ",
                                 usage.range_bytes, " in activations and temporaries, ", usage.small_bytes,
                                 " in small allocations and ", usage.reserve_bytes, " kept for them, ",
                                 usage.available_bytes(), " available; raise ", budget_name(), options.remedy));
}

}  // namespace torch_offload
