// What holds pages where they are for a while: a pin for an operator, a latch for an update. Layer pager.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pager/in_flight_uses.h"
#include "pager/page_table.h"
#include "pager/pin_tally.h"
#include "pager/remote_work.h"

namespace torch_offload {

/// Holds pages of segments mapped, until the kernels that were given them have passed. Move-only; an empty guard holds
/// nothing. Its end waits for nothing.
class [[nodiscard]] PinGuard {
public:
    PinGuard() noexcept = default;
    PinGuard(PinGuard&& other) noexcept { swap(other); }
    PinGuard& operator=(PinGuard other) noexcept {
        swap(other);
        return *this;
    }
    ~PinGuard();
    void swap(PinGuard& other) noexcept {
        share_.swap(other.share_);
        held_.swap(other.held_);
    }
    /// It outlives the operator, or goes to another thread: nobody who runs out of memory waits for its end.
    void keep() noexcept { share_ = {}; }

private:
    friend struct PageAccess;
    PinTally::Share share_;  // ends after the pins
    std::vector<HeldPages> held_;
};

/// Pages of equal index of several segments, held for an update wherever their bytes lie: in frames here, or in the
/// tier below. Move-only.
class [[nodiscard]] UpdateLatch {
public:
    UpdateLatch() noexcept = default;
    UpdateLatch(UpdateLatch&& other) noexcept { swap(other); }
    UpdateLatch& operator=(UpdateLatch other) noexcept {
        swap(other);
        return *this;
    }
    /// Pages become dirty, and are not moved before the kernels that were given them have passed; those that `finish()`
    /// was called for lose their pending mark.
    ~UpdateLatch();
    void swap(UpdateLatch& other) noexcept;

    explicit operator bool() const noexcept { return !pages_.empty(); }
    /// The bytes of page k of the latch (without the padding to a sector). Pre: not is_remote().
    std::span<std::byte> bytes(std::size_t k) const noexcept { return bytes_[k]; }
    /// The pages are in another process, which runs the work.
    bool is_remote() const noexcept { return is_remote_; }
    /// Pre: is_remote(); the latch stays until work.end(). Throws: std::bad_alloc, and then end() is not called.
    void run_remotely(RemoteWork work);
    /// Pre: is_remote(). Operators have run there.
    void note_ran() noexcept { confirmed_ = true; }
    /// The update succeeded: pending marks go when the latch is released.
    void finish() noexcept;
    /// Nobody will read page k of the latch any more: it may leave without being written.
    void discard(std::size_t k) noexcept;

private:
    friend struct PageAccess;
    /// Where a page of the latch is held: in its frame's slot, at the segment's address, or in the tier below.
    enum class Location : std::uint8_t { slot, address, below };

    void release_page(std::size_t k) noexcept;
    std::vector<Page*> pages_;
    std::vector<std::shared_ptr<Segment>> segments_;
    std::vector<std::span<std::byte>> bytes_;
    std::vector<Location> locations_;
    std::vector<bool> is_worthless_;
    PinTally::Share share_;                      // of a thread that waits: others wait for it
    std::unique_ptr<UpdateLatch> below_;         // of the store's pages, where they are held there
    bool finished_ = false, confirmed_ = false;  // confirmed: complete, so its bytes may have been changed
    bool is_remote_ = false;
    bool is_transient_ = false;  // counted in the pager as held by a thread that does not wait
};

}  // namespace torch_offload
