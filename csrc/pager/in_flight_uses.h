// What the program is done with and the device is not yet. Layer pager: includes base, device.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "device/stream.h"
#include "pager/page_table.h"

namespace torch_offload {

/// Where nobody can be told to come back later. A device that is lost uses nothing any more.
void wait_until_passed(const Event& event) noexcept;

/// Pins of consecutive pages of one segment.
struct HeldPages {
    std::shared_ptr<Segment> segment;
    std::size_t first = 0;
    std::size_t count = 0;
};

/// What one guard or latch held, or a freed range, and the event behind the kernels that were given it.
struct InFlightUse {
    std::shared_ptr<const Event> event;
    std::vector<HeldPages> pages;
    std::vector<const Page*> in_slot;  // those of them that are used in their frame's slot
    std::span<std::byte> range;
};

/// The uses whose kernels may still run, oldest first: a kernel outlives the guard of its arguments. They end in order;
/// with several streams some end later than they could.
/// Threads: any. A use is closed by whoever takes it out, without a lock: it may be the last owner of a segment.
class InFlightUses {
public:
    /// It stays the caller's if this throws.
    void add(InFlightUse&& use);
    /// The oldest, if its event has passed.
    std::optional<InFlightUse> take_passed();
    /// The oldest, whether it has or not.
    std::optional<InFlightUse> take_oldest();
    /// The event of the oldest; nullptr: there is none.
    std::shared_ptr<const Event> oldest() const;
    /// The event of the last use of the page in its slot; nullptr: there is none.
    std::shared_ptr<const Event> last_in_slot(const Page& page) const;
    std::size_t count() const noexcept { return count_.load(std::memory_order_acquire); }

private:
    mutable std::mutex mutex_;  // guards the next; a leaf
    std::deque<InFlightUse> uses_;
    std::atomic<std::size_t> count_{0};  // so that who asks for nothing takes no lock
};

}  // namespace torch_offload
