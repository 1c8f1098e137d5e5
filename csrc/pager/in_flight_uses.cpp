#include "pager/in_flight_uses.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/log.h"
#include "pager/pager_guards.h"

namespace torch_offload {

void InFlightUses::add(InFlightUse&& use) {
    const std::lock_guard lock(mutex_);
    uses_.push_back(std::move(use));
    const InFlightUse& added = uses_.back();
    if (added.is_update) {
        try {
            for (const HeldPages& held : added.pages) {
                for (std::size_t i = held.first; i < held.first + held.count; ++i) {
                    updates_[&held.segment->page(i)] = added.event;
                }
            }
        } catch (...) {
            use = std::move(uses_.back());
            uses_.pop_back();
            forget_updates(use);
            throw;
        }
        update_count_.fetch_add(1, std::memory_order_release);
    }
    count_.fetch_add(1, std::memory_order_release);
}

void wait_until_passed(const Event& event) noexcept {
    try {
        event.wait();
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "the device failed while it was being waited for: ", error.what());
    }
}

std::optional<InFlightUse> InFlightUses::take_passed() {
    const std::shared_ptr<const Event> event = oldest();
    if (!event || !event->has_passed()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    if (uses_.empty() || uses_.front().event != event) return std::nullopt;  // somebody else took it
    return take_front();
}

std::optional<InFlightUse> InFlightUses::take_oldest() {
    const std::lock_guard lock(mutex_);
    return uses_.empty() ? std::nullopt : take_front();
}

/// The lock is held.
std::optional<InFlightUse> InFlightUses::take_front() {
    std::optional<InFlightUse> use = std::move(uses_.front());
    uses_.pop_front();
    forget_updates(*use);
    if (use->is_update) update_count_.fetch_sub(1, std::memory_order_release);
    count_.fetch_sub(1, std::memory_order_release);
    return use;
}

/// Those that no later one of the same page has taken the place of. The lock is held.
void InFlightUses::forget_updates(const InFlightUse& use) noexcept {
    if (!use.is_update) return;
    for (const HeldPages& held : use.pages) {
        for (std::size_t i = held.first; i < held.first + held.count; ++i) {
            const auto last = updates_.find(&held.segment->page(i));
            if (last != updates_.end() && last->second == use.event) updates_.erase(last);
        }
    }
}

std::shared_ptr<const Event> InFlightUses::oldest() const {
    if (count_.load(std::memory_order_acquire) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    return uses_.empty() ? nullptr : uses_.front().event;
}

std::shared_ptr<const Event> InFlightUses::last_update(const Page& page) const {
    if (update_count_.load(std::memory_order_acquire) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto last = updates_.find(&page);
    return last == updates_.end() ? nullptr : last->second;
}

void InFlightUses::order_after_updates(const Device& device, const Segment& segment, PageRange pages) const {
    for (std::size_t i = pages.first; i < pages.first + pages.count; ++i) {
        if (const auto update = last_update(segment.page(i))) device.order_after(*update);
    }
}

// --- The pager's side ---------------------------------------------------------------------------------------------

std::shared_ptr<const Event> Pager::Impl::fence_use() noexcept {
    return options.device && is_of_device() ? options.device->fence_use() : nullptr;
}

void Pager::Impl::end_use(InFlightUse use) noexcept {
    if (use.event) {
        try {
            uses.add(std::move(use));
            return;
        } catch (const std::bad_alloc&) {
            wait_until_passed(*use.event);
        }
    }
    close_use(use);
}

void Pager::Impl::close_use(const InFlightUse& use) noexcept {
    drop_pins(use.pages);
    if (!use.range.empty()) {
        MemoryLock lock(*this);
        arena.give_range(use.range, lock);
    }
    announce_progress();
}

void Pager::Impl::close_passed_uses() noexcept {
    while (const std::optional<InFlightUse> use = uses.take_passed()) close_use(*use);
}

/// False if nothing is in use. Throws: TierIoError if the device is lost, nothing is in use then; what Event::wait()
/// says if it cannot be waited for yet.
bool Pager::Impl::wait_for_oldest_use() {
    const std::shared_ptr<const Event> event = uses.oldest();
    if (!event) return false;
    {
        const ProgramWait wait(*this, StallCause::memory);
        event->wait();
    }
    close_passed_uses();
    return true;
}

}  // namespace torch_offload
