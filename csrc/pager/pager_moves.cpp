// What moves a page from one state to the next: memory for it, its bytes, its address. Each owns the page meanwhile.
#include "base/log.h"
#include "pager/pager_guards.h"

namespace torch_offload {
namespace {

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

bool is_to_be_loaded(PageWord word, PageGoal goal) noexcept {
    return word.is_absent() || (word.state() == PageState::failed && goal == PageGoal::overwrite);
}

}  // namespace

std::span<std::byte> Pager::Impl::mapped_range(const Page& page) const noexcept {
    return whole_granules(page.segment->page_range(page.segment->index_of(page)));
}

/// Absent to loading (or at once loaded, where nothing is read). Waits for memory. `own` learns of a page that is
/// undefined from now on.
void Pager::Impl::start_load(Page& page, PageGoal goal, Overwriting* own) {
    if (!is_to_be_loaded(page.load(), goal)) return;
    FrameHold frame(*this, acquire_frame(page.segment->frame_bytes(page.segment->index_of(page))));
    const bool is_overwritten = goal == PageGoal::overwrite && own != nullptr;
    if (is_overwritten) own->add(page);
    bool is_taken = false;
    try {
        is_taken = load_into(page, goal, frame);
    } catch (...) {
        if (is_overwritten) own->drop(page);
        throw;
    }
    if (is_overwritten && !is_taken) own->drop(page);
}

/// Pre: the page is loading. Who waits for memory counts on it before the store does.
void Pager::Impl::begin_read(Page& page) {
    moving_pages.fetch_add(1, std::memory_order_acq_rel);
    try {
        store->read(page.segment->shared_from_this(), page);
    } catch (...) {
        end_move(0);
        throw;
    }
}

/// False if somebody else was first; the frame then stays the caller's, as it does if this throws: the page is then as
/// it was.
bool Pager::Impl::load_into(Page& page, PageGoal goal, FrameHold& frame) {
    PageWord seen = page.load();
    do {
        if (!is_to_be_loaded(seen, goal)) return false;
    } while (!page.change(seen, seen.with(PageState::loading).without_flag(PageWord::kTransferFailed)));
    if (seen.has(PageWord::kTransferFailed)) forget_error(page);
    page.frame = frame.frame();
    try {
        if (const std::lock_guard lock(mutex); !page.segment->eviction_rank) rank(*page.segment, predictor->hold());
        if (goal == PageGoal::overwrite) {
            page.enter(PageState::loaded, PageWord::kUndefined);
        } else if (seen.state() == PageState::zero) {
            memory.fill_zero(page.frame.slot);
            page.enter(PageState::loaded);
        } else {
            begin_read(page);
        }
    } catch (...) {
        page.frame = Frame{};
        page.enter(seen.state());
        announce_progress();
        throw;
    }
    frame.hand_over();
    return true;
}

/// Pre: the page is busy and was loaded, as `before` says. If this throws, it is loaded again, or lost.
void Pager::Impl::map_page(Page& page, PageWord before, bool is_write) {
    const bool is_writable = is_write || before.has(PageWord::kDirty);
    try {
        if (const auto update = memory.keeps_place() ? nullptr : uses.last_update(page)) update->wait();
        check_idle(page.frame.slot);
        memory.move(page.frame.slot, mapped_range(page).data(),
                    is_writable ? Protection::read_write : Protection::read);
    } catch (const std::exception& error) {
        if (can_protect(memory, page.frame.slot, Protection::read_write)) {
            page.enter(PageState::loaded);
        } else {
            lose_page(page, error.what());
        }
        throw;
    }
    const bool is_written = is_write && !before.has(PageWord::kUndefined);
    const std::uint32_t written = is_written ? PageWord::kDirty : 0;
    page.enter(PageState::mapped, written | (is_writable ? PageWord::kWritable : 0), PageWord::kPoisoned);
    if (is_written && !before.has(PageWord::kDirty)) drop_outdated_below(page);
}

/// Pre: the page is busy and was mapped read-only.
void Pager::Impl::make_writable(Page& page) {
    try {
        memory.protect(mapped_range(page), Protection::read_write);
    } catch (...) {
        page.enter(PageState::mapped);
        throw;
    }
    page.enter(PageState::mapped, PageWord::kWritable | PageWord::kDirty);
    drop_outdated_below(page);
}

/// Pre: the page is busy and was mapped. Its bytes end up in its frame's slot; if this throws, it is mapped as before,
/// or, where writes to it would not be noticed any more, as one that was written to.
void Pager::Impl::unmap_page(Page& page) {
    check_idle(mapped_range(page));
    try {
        memory.move(mapped_range(page), page.frame.slot.data(), Protection::read_write);
    } catch (const std::exception& error) {
        const bool is_writable = page.load().has(PageWord::kWritable);
        if (can_protect(memory, mapped_range(page), is_writable ? Protection::read_write : Protection::read)) {
            page.enter(PageState::mapped);
        } else if (can_protect(memory, mapped_range(page), Protection::read_write)) {
            page.enter(PageState::mapped, PageWord::kWritable | PageWord::kDirty);
        } else {
            lose_page(page, error.what());
        }
        throw;
    }
}

/// Pre: the page is busy and its bytes lie in its frame's slot. It ends evicting, or absent; if this throws, loaded.
void Pager::Impl::drop_or_write(Page& page) {
    evictions.increment();
    if (page.load().has(PageWord::kDirty)) {
        moving_pages.fetch_add(1, std::memory_order_acq_rel);
        evicting_bytes.fetch_add(page.frame.slot.size(), std::memory_order_acq_rel);
        page.enter(PageState::evicting, 0, PageWord::kWritable | PageWord::kTransferFailed);
        try {
            store->write(page.segment->shared_from_this(), page);
        } catch (...) {
            page.enter(PageState::loaded);
            end_move(page.frame.slot.size());
            throw;
        }
        return;
    }
    clean_drops.increment();
    drop_page(page);
}

/// Pre: the page is busy, its bytes lie in its frame's slot, and nobody needs them there any more. It ends absent.
void Pager::Impl::drop_page(Page& page) noexcept {
    retire_frame(page);
    const PageState absent = page.load().has(PageWord::kStored) ? PageState::stored : PageState::zero;
    page.enter(absent, 0, PageWord::kWritable | PageWord::kDirty);
    announce_progress();
}

/// Pre: the page is busy. Its memory could not be moved, and cannot be used where it is. Called while that error,
/// `why`, is handled.
void Pager::Impl::lose_page(Page& page, const char* why) noexcept {
    const PageWord word = page.load();
    const bool is_stored = word.has(PageWord::kStored) && !word.has(PageWord::kDirty);
    const std::exception_ptr error = exception_from([&] {
        return CorruptPage(concat("page ", page.segment->index_of(page), " of ", page.segment->label,
                                  " is lost, the system gave no access to its memory (", why,
                                  "): overwrite the tensor, or restart from the last checkpoint"));
    });
    const Frame frame = std::exchange(page.frame, Frame{});
    memory.release(frame.slot);
    {
        const std::lock_guard lock(mutex);
        if (!is_stored) page.error = error;
        arena.give_up_frame(frame);
    }
    if (is_stored) {
        page.enter(PageState::stored, 0, PageWord::kWritable);
    } else {
        page.enter(PageState::failed, 0, PageWord::kWritable | PageWord::kDirty | PageWord::kStored);
    }
}

/// Pre: the page is undefined and the caller has a pin on it. Its bytes are where they were before: in the store,
/// nowhere, or lost.
void Pager::Impl::undo_overwrite(Page& page) noexcept {
    const bool was_mapped = page.load().state() == PageState::mapped;
    page.enter(PageState::busy);
    if (was_mapped) take_out_of_segment(page);
    page.enter(PageState::busy);  // one that could not be moved has been put back, on a lost device without its memory
    if (page.frame) retire_frame(page);
    PageState before = PageState::zero;
    if (page.load().has(PageWord::kStored)) {
        before = PageState::stored;
    } else if (const std::lock_guard lock(mutex); page.error) {
        before = PageState::failed;
    }
    page.enter(before, 0, PageWord::kUndefined | PageWord::kWritable);
    announce_progress();
}

}  // namespace torch_offload
