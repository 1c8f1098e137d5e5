#include "pager/in_flight_uses.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/log.h"
#include "pager/pager_guards.h"

namespace torch_offload {

void InFlightUses::add(InFlightUse&& use) {
    const std::lock_guard lock(mutex_);
    std::deque<InFlightUse>& uses = lane_of(use.event->queue()).uses;
    uses.push_back(std::move(use));
    InFlightUse& added = uses.back();
    added.number = ++added_;
    if (added.is_update) {
        try {
            for (const HeldPages& held : added.pages) {
                for (std::size_t i = held.first; i < held.first + held.count; ++i) {
                    updates_[&held.segment->page(i)] = added.event;
                }
            }
        } catch (...) {
            use = std::move(added);
            uses.pop_back();
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
    for (std::size_t i = 0; count() != 0; ++i) {
        std::shared_ptr<const Event> event;
        {
            const std::lock_guard lock(mutex_);
            if (i >= lanes_.size()) break;
            if (lanes_[i].uses.empty()) continue;
            event = lanes_[i].uses.front().event;
        }
        if (!event->has_passed()) continue;
        const std::lock_guard lock(mutex_);
        Lane& lane = lanes_[i];
        if (!lane.uses.empty() && lane.uses.front().event == event) return take_front(lane);  // else somebody did
    }
    return std::nullopt;
}

std::optional<InFlightUse> InFlightUses::take_oldest() {
    const std::lock_guard lock(mutex_);
    const std::size_t lane = oldest_lane();
    if (lane == lanes_.size()) return std::nullopt;
    return take_front(lanes_[lane]);
}

/// That of the queue, or one that is not in use. The lock is held; so below.
InFlightUses::Lane& InFlightUses::lane_of(const void* queue) {
    const auto known = std::ranges::find(lanes_, queue, &Lane::queue);
    if (known != lanes_.end()) return *known;
    const auto idle = std::ranges::find_if(lanes_, [](const Lane& lane) { return lane.uses.empty(); });
    Lane& lane = idle != lanes_.end() ? *idle : lanes_.emplace_back();
    lane.queue = queue;
    return lane;
}

/// The number of lanes where nothing is in use.
std::size_t InFlightUses::oldest_lane() const noexcept {
    std::size_t oldest = lanes_.size();
    std::uint64_t number = ~std::uint64_t{0};
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        if (lanes_[i].uses.empty() || lanes_[i].uses.front().number > number) continue;
        number = lanes_[i].uses.front().number;
        oldest = i;
    }
    return oldest;
}

InFlightUse InFlightUses::take_front(Lane& lane) {
    InFlightUse use = std::move(lane.uses.front());
    lane.uses.pop_front();
    forget_updates(use);
    if (use.is_update) update_count_.fetch_sub(1, std::memory_order_release);
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
    const std::size_t lane = oldest_lane();
    return lane == lanes_.size() ? nullptr : lanes_[lane].uses.front().event;
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

/// Whether there were any.
bool Pager::Impl::close_passed_uses() noexcept {
    bool were_any = false;
    for (; const std::optional<InFlightUse> use = uses.take_passed(); were_any = true) close_use(*use);
    return were_any;
}

/// What has passed meanwhile is not waited for. False if nothing is in use. Throws: TierIoError if the device is lost,
/// nothing is in use then; what Event::wait() says if it cannot be waited for yet.
bool Pager::Impl::wait_for_oldest_use() {
    if (close_passed_uses()) return true;
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
