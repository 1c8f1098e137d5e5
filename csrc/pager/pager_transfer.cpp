// What the mover tells the pager: a page arrived, left, or failed to.
#include <algorithm>

#include "base/log.h"
#include "pager/pager_impl.h"
#include "storage/checksum.h"

namespace torch_offload {
namespace {

PageIdentity identity_of(std::uint64_t store_id, const Page& page) {
    const std::uint64_t index = page.segment->index_of(page);
    return {store_id, page.segment->id() << 24 | index, page.version};
}

}  // namespace

void Pager::Impl::prepare_write(Page& page) {
    if (!page.extent) page.extent = file.allocate(page.frame.slot.size());
    ++page.version;
    page.checksum = page_checksum(page.frame.slot, identity_of(store_id, page));
}

bool Pager::Impl::frame_matches(const Page& page) {
    return page_checksum(page.frame.slot, identity_of(store_id, page)) == page.checksum;
}

void Pager::Impl::finish_read(const std::shared_ptr<Segment>& segment, Page& page) {
    read_bytes[kind_index(*segment)].add(page.frame.slot.size());
    page.enter(PageState::loaded);
    end_move(0);
}

/// Who waits for memory gives up when nothing moves and nothing was announced since it looked: so the announcement
/// comes before the counts go down, and again after, for who saw them still up.
void Pager::Impl::end_move(std::size_t left_bytes) noexcept {
    announce_progress();
    leaving_bytes.fetch_sub(left_bytes, std::memory_order_acq_rel);
    moving_pages.fetch_sub(1, std::memory_order_acq_rel);
    announce_progress();
}

void Pager::Impl::finish_write(Page& page) {
    const std::size_t size_bytes = page.frame.slot.size();
    written_bytes[kind_index(*page.segment)].add(size_bytes);
    if (page.load().pin_count() != 0) {
        page.enter(PageState::loaded, 0, PageWord::kDirty);  // wanted again meanwhile
    } else {
        {
            const std::lock_guard lock(mutex);
            arena.give_frame(page.frame);
        }
        page.frame = Frame{};
        page.enter(PageState::stored, 0, PageWord::kDirty);
    }
    end_move(size_bytes);
}

void Pager::Impl::fail_read(Page& page, const std::string& why, int error_number, std::uint64_t offset_bytes) {
    const std::string message =
        concat("ssd tier: reading page ", page.segment->index_of(page), " of ", page.segment->label, " at offset ",
               offset_bytes, " of the scratch file in ", file.directory(*page.extent), " failed: ", why,
               "; the page is lost, restart from the last checkpoint on a sound disk");
    {
        const std::lock_guard lock(mutex);
        page_errors[&page] = {message, error_number};
        arena.give_frame(page.frame);
    }
    page.frame = Frame{};
    page.enter(PageState::failed);
    end_move(0);
}

/// The bytes are still in memory: the page stays usable, the error is raised by the next pin, and evicting the page
/// again tries again.
void Pager::Impl::fail_write(Page& page, const std::string& why, int error_number) {
    keep_error(std::make_exception_ptr(TierIoError(
        concat("ssd tier: writing page ", page.segment->index_of(page), " of ", page.segment->label,
               page.extent ? concat(" to the scratch file in ", file.directory(*page.extent)) : std::string(),
               " failed: ", why),
        error_number)));
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

void Pager::Impl::keep_error(std::exception_ptr error) {
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
    std::pair<std::string, int> error{"the page was lost to an earlier error", 0};
    {
        const std::lock_guard lock(mutex);
        if (const auto found = page_errors.find(&page); found != page_errors.end()) error = found->second;
    }
    if (error.second == 0) throw CorruptPage(error.first);
    throw TierIoError(error.first, error.second);
}

}  // namespace torch_offload
