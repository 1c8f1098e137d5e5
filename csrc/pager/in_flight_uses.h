// What the program is done with and the device is not yet. Layer pager: includes base, device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
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
    std::span<std::byte> range;
    bool is_update = false;    // of the pages, by deferred work
    std::uint64_t number = 0;  // in the order in which they were added
};

/// The uses whose kernels may still run: a kernel outlives the guard of its arguments. Those of a stream end in order,
/// whatever others do.
/// Threads: any. A use is closed by whoever takes it out, without a lock: it may be the last owner of a segment.
class InFlightUses {
public:
    /// It stays the caller's if this throws.
    void add(InFlightUse&& use);
    /// The oldest of a stream, if its event has passed.
    std::optional<InFlightUse> take_passed();
    /// The oldest, whether it has or not.
    std::optional<InFlightUse> take_oldest();
    /// The event of the oldest; nullptr: there is none.
    std::shared_ptr<const Event> oldest() const;
    /// The event of the page's last update; nullptr: there is none. Costs next to nothing where there are no updates.
    std::shared_ptr<const Event> last_update(const Page& page) const;
    /// What the calling thread gives the device from now on finds what updates leave in the pages. Throws: as
    /// Event::wait().
    void order_after_updates(const Device& device, const Segment& segment, PageRange pages) const;
    std::size_t count() const noexcept { return count_.load(std::memory_order_acquire); }

private:
    /// In the order of one stream.
    struct Lane {
        const void* queue = nullptr;
        std::deque<InFlightUse> uses;
    };
    Lane& lane_of(const void* queue);
    std::size_t oldest_lane() const noexcept;
    InFlightUse take_front(Lane& lane);
    void forget_updates(const InFlightUse& use) noexcept;

    mutable std::mutex mutex_;  // guards the next three; a leaf
    std::vector<Lane> lanes_;   // of streams that were used side by side; none is ever taken out
    std::uint64_t added_ = 0;
    std::unordered_map<const Page*, std::shared_ptr<const Event>> updates_;  // the last of each page
    std::atomic<std::size_t> count_{0};  // so that who asks for nothing takes no lock
    std::atomic<std::size_t> update_count_{0};
};

}  // namespace torch_offload
