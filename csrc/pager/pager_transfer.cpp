// What the store tells the pager: a page arrived, left, or failed to.
#include <algorithm>

#include "pager/pager_impl.h"

namespace torch_offload {

/// On the lane of whatever this pager's memory is filled from.
void Pager::Impl::note_transfer(const Page& page, IoDirection direction, std::int64_t begin_ns) {
    ActivityLog* const log = options.activity_log;
    if (!log || !log->is_on()) return;
    const bool is_read = direction == IoDirection::read;
    const ActivityLane lane = is_of_device() ? (is_read ? ActivityLane::to_device : ActivityLane::to_host)
                                             : (is_read ? ActivityLane::ssd_read : ActivityLane::ssd_write);
    log->add({lane, begin_ns, activity_now_ns(), page.frame.slot.size(), page.segment->label});
}

void Pager::Impl::finish_read(const std::shared_ptr<Segment>& segment, Page& page) {
    read_bytes[kind_index(*segment)].add(page.frame.slot.size());
    page.enter(PageState::loaded);
    end_move(0);
}

/// Who waits for memory gives up when nothing moves and nothing was requested since it looked: so the announcement
/// comes before the counts go down, and again after, for who saw them still up.
void Pager::Impl::end_move(std::size_t left_bytes) noexcept {
    announce_progress();
    evicting_bytes.fetch_sub(left_bytes, std::memory_order_acq_rel);
    moving_pages.fetch_sub(1, std::memory_order_acq_rel);
    announce_progress();
}

void Pager::Impl::finish_write(Page& page) {
    const std::size_t size_bytes = page.frame.slot.size();
    written_bytes[kind_index(*page.segment)].add(size_bytes);
    if (page.load().pin_count() != 0) {
        page.enter(PageState::loaded, PageWord::kStored, PageWord::kDirty);  // wanted again meanwhile
    } else {
        retire_frame(page);
        page.enter(PageState::stored, PageWord::kStored, PageWord::kDirty);
    }
    end_move(size_bytes);
}

void Pager::Impl::fail_read(Page& page, std::exception_ptr error) {
    {
        const std::lock_guard lock(mutex);
        page_errors[&page] = std::move(error);
    }
    retire_frame(page);
    page.enter(PageState::failed);
    end_move(0);
}

/// The bytes are still in memory: the page stays usable, and evicting it again tries again.
void Pager::Impl::fail_write(Page& page, std::exception_ptr error) {
    note_error(std::move(error));
    const std::size_t size_bytes = page.frame.slot.size();
    page.enter(PageState::loaded);
    end_move(size_bytes);
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

void Pager::Impl::take_unregistered(const Frame& frame) {
    {
        const std::lock_guard lock(mutex);
        registered_bytes -= frame.slot.size();
        arena.give_frame(frame);
    }
    end_transient();
}

/// Registered memory is slower to give back, so at most half of the budget is.
bool Pager::Impl::may_register(std::size_t size_bytes) {
    const std::lock_guard lock(mutex);
    return registered_bytes + size_bytes <= options.budget_bytes / 2;
}

void Pager::Impl::note_registered(std::size_t size_bytes) {
    const std::lock_guard lock(mutex);
    registered_bytes += size_bytes;
}

void Pager::Impl::note_error(std::exception_ptr error) {
    {
        const std::lock_guard lock(mutex);
        kept_error = std::move(error);
    }
    has_kept_error.store(true, std::memory_order_release);
    announce_progress();
}

void Pager::Impl::raise_kept_error() {
    if (!has_kept_error.load(std::memory_order_acquire)) return;
    std::exception_ptr error;
    {
        const std::lock_guard lock(mutex);
        error = std::exchange(kept_error, nullptr);
        has_kept_error.store(false, std::memory_order_release);
    }
    if (error) std::rethrow_exception(error);
}

void Pager::Impl::raise_page_error(const Page& page) {
    std::exception_ptr error;
    {
        const std::lock_guard lock(mutex);
        if (const auto found = page_errors.find(&page); found != page_errors.end()) error = found->second;
    }
    if (error) std::rethrow_exception(error);
    throw CorruptPage("the page was lost to an earlier error");
}

}  // namespace torch_offload
