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
    std::optional<InFlightUse> use = std::move(uses_.front());
    uses_.pop_front();
    count_.fetch_sub(1, std::memory_order_release);
    return use;
}

std::optional<InFlightUse> InFlightUses::take_oldest() {
    const std::lock_guard lock(mutex_);
    if (uses_.empty()) return std::nullopt;
    std::optional<InFlightUse> use = std::move(uses_.front());
    uses_.pop_front();
    count_.fetch_sub(1, std::memory_order_release);
    return use;
}

std::shared_ptr<const Event> InFlightUses::oldest() const {
    if (count_.load(std::memory_order_acquire) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    return uses_.empty() ? nullptr : uses_.front().event;
}

std::shared_ptr<const Event> InFlightUses::last_in_slot(const Page& page) const {
    if (count_.load(std::memory_order_acquire) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto uses_page = [&](const InFlightUse& use) { return std::ranges::count(use.in_slot, &page) != 0; };
    const auto last = std::find_if(uses_.rbegin(), uses_.rend(), uses_page);
    return last == uses_.rend() ? nullptr : last->event;
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
