// What the store tells the pager: a page arrived, left, or failed to.
#include <algorithm>

#include "pager/pager_guards.h"

namespace torch_offload {
namespace {

std::size_t kind_index(const Segment& segment) noexcept { return static_cast<std::size_t>(segment.kind()); }

}  // namespace

/// On the lane of whatever this pager's memory is filled from.
void Pager::Impl::note_transfer(const Page& page, IoDirection direction, std::int64_t begin_ns) noexcept {
    ActivityLog* const log = options.activity_log;
    if (!log || !log->is_on()) return;
    const bool is_read = direction == IoDirection::read;
    const ActivityLane lane = is_of_device() ? (is_read ? ActivityLane::to_device : ActivityLane::to_host)
                                             : (is_read ? ActivityLane::ssd_read : ActivityLane::ssd_write);
    log->add({lane, begin_ns, activity_now_ns(), page.frame.slot.size(), page.segment->label});
}

void Pager::Impl::end_read(const std::shared_ptr<Segment>& segment, Page& page, const TransferEnd& end) noexcept {
    end_lateness(page);
    if (end.status == TransferStatus::ok) {
        note_transfer(page, IoDirection::read, end.begin_ns);
        read_bytes[kind_index(*segment)].add(page.frame.slot.size());
        page.enter(PageState::loaded, 0, PageWord::kTransferFailed);
    } else {
        {
            const std::lock_guard lock(mutex);
            page.error = end.error;
        }
        retire_frame(page);
        if (end.status == TransferStatus::lost) {
            page.enter(PageState::failed, 0, PageWord::kStored | PageWord::kTransferFailed);
        } else {
            page.enter(PageState::stored, PageWord::kTransferFailed);
        }
    }
    end_move(0);
    planner.wake();
}

/// Who waits for memory gives up when nothing moves and nothing was requested since it looked: so the announcement
/// comes before the counts go down, and again after, for who saw them still up.
void Pager::Impl::end_move(std::size_t left_bytes) noexcept {
    announce_progress();
    evicting_bytes.fetch_sub(left_bytes, std::memory_order_acq_rel);
    moving_pages.fetch_sub(1, std::memory_order_acq_rel);
    announce_progress();
}

/// After a failed write the bytes are still in memory: the page stays usable, and is tried again after others.
void Pager::Impl::end_write(Page& page, const TransferEnd& end) noexcept {
    const std::size_t size_bytes = page.frame.slot.size();
    const std::size_t expected_bytes = end_lateness(page) ? 0 : size_bytes;
    if (end.status != TransferStatus::ok) {
        {
            const std::lock_guard lock(mutex);
            unwritable.add(page, end.error, steady_ns());
        }
        page.enter(PageState::loaded, 0, PageWord::kTransferFailed);
        end_move(expected_bytes);
        planner.wake();
        return;
    }
    note_transfer(page, IoDirection::write, end.begin_ns);
    written_bytes[kind_index(*page.segment)].add(size_bytes);
    {
        const std::lock_guard lock(mutex);
        unwritable.remove(page);
    }
    if (page.load().pin_count() != 0) {
        constexpr std::uint32_t kCleared = PageWord::kDirty | PageWord::kTransferFailed;
        page.enter(PageState::loaded, PageWord::kStored, kCleared);  // wanted again meanwhile
    } else {
        retire_frame(page);
        page.enter(PageState::stored, PageWord::kStored, PageWord::kDirty | PageWord::kTransferFailed);
    }
    end_move(expected_bytes);
    planner.wake();
}

/// The frames are nobody's until take_unregistered(): who waits for memory waits for them too.
std::vector<Frame> Pager::Impl::frames_to_unregister() {
    const std::lock_guard lock(mutex);
    if (unregister_wanted_bytes == 0) return {};
    std::vector<Frame> frames = arena.take_registered_free_frames(unregister_wanted_bytes);
    unregister_wanted_bytes = 0;
    for (std::size_t i = 0; i < frames.size(); ++i) Transient(*this).hand_over();
    return frames;
}

void Pager::Impl::take_unregistered(const Frame& frame) noexcept {
    {
        MemoryLock lock(*this);
        registered_bytes -= frame.slot.size();
        arena.give_frame(frame, lock);
    }
    end_transient();
}

/// Registered memory is slower to give back, so at most half of the budget is.
bool Pager::Impl::begin_registration(std::size_t size_bytes) noexcept {
    const std::lock_guard lock(mutex);
    if (registered_bytes + size_bytes > options.budget_bytes / 2 || !arena.expect_registered(size_bytes)) return false;
    registered_bytes += size_bytes;
    return true;
}

void Pager::Impl::end_registration(std::size_t size_bytes, bool is_registered) noexcept {
    if (is_registered) return;
    const std::lock_guard lock(mutex);
    registered_bytes -= size_bytes;
    arena.forget_registered(size_bytes);
}

/// The page stays the store's; nobody waits for it any longer.
void Pager::Impl::note_late(Page& page, IoDirection direction, std::exception_ptr error) noexcept {
    {
        const std::lock_guard lock(mutex);
        page.error = error;
        late_error = error;
        if (direction == IoDirection::write) unwritable.add(page, error, steady_ns());
    }
    late_pages.fetch_add(1, std::memory_order_acq_rel);
    const bool is_write = direction == IoDirection::write;
    if (is_write) evicting_bytes.fetch_sub(page.frame.slot.size(), std::memory_order_acq_rel);
    page.set_flag(PageWord::kTransferFailed);
    announce_progress();
}

/// Of a transfer that has ended. False if it was not late.
bool Pager::Impl::end_lateness(Page& page) noexcept {
    if (!page.load().has(PageWord::kTransferFailed)) return false;
    forget_error(page);
    late_pages.fetch_sub(1, std::memory_order_acq_rel);
    return true;
}

/// Whether a transfer is under way that is not late: memory may come of it.
bool Pager::Impl::is_anything_moving() const noexcept {
    return moving_pages.load(std::memory_order_acquire) > late_pages.load(std::memory_order_acquire);
}

/// Raises why memory is not to be had while the disk does not answer.
void Pager::Impl::raise_late_error() {
    std::exception_ptr error;
    if (late_pages.load(std::memory_order_acquire) != 0) {
        const std::lock_guard lock(mutex);
        error = late_error;
    }
    if (error) std::rethrow_exception(error);
}

void Pager::Impl::raise_if_late(const Page& page, PageWord seen) {
    const bool is_moving = seen.state() == PageState::loading || seen.state() == PageState::evicting;
    if (is_moving && seen.has(PageWord::kTransferFailed)) raise_page_error(page);
}

/// Of an access whose result may already have been used.
void Pager::Impl::raise_fault_error() {
    if (!fault_errors.is_waiting()) return;
    std::exception_ptr error = fault_errors.take();
    try {
        clear_poison();
    } catch (...) {
        fault_errors.keep(std::move(error));  // for the next pin
        throw;
    }
    if (error) std::rethrow_exception(error);
}

/// Raises why a page could not be written lately that still has to be, unless that was raised already.
void Pager::Impl::raise_unsaid_write_error() {
    std::exception_ptr error;
    {
        const std::lock_guard lock(mutex);
        error = unwritable.unsaid_error();
    }
    if (error) std::rethrow_exception(error);
}

/// The same of every page, or of a segment's, whether it was raised before or not.
void Pager::Impl::raise_write_error(const Segment* segment) {
    std::exception_ptr error;
    {
        const std::lock_guard lock(mutex);
        const auto is_of_it = [&](const Page& page) { return !segment || page.segment == segment; };
        error = unwritable.error_of(is_of_it);
    }
    if (error) std::rethrow_exception(error);
}

void Pager::Impl::forget_error(Page& page) noexcept {
    const std::lock_guard lock(mutex);
    page.error = nullptr;
}

/// Returns where the error has gone since the page was looked at: its word is to be looked at again.
void Pager::Impl::raise_page_error(const Page& page) {
    std::exception_ptr error;
    {
        const std::lock_guard lock(mutex);
        error = page.error;
        unwritable.unsaid_error();  // one error of a disk is enough to tell of it
    }
    if (error) std::rethrow_exception(error);
    if (page.load().state() == PageState::failed) throw CorruptPage("the page was lost to an earlier error");
}

}  // namespace torch_offload
