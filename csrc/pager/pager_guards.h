// What threads hold of a pager for a while, for its own files. Layer pager. Included by csrc/pager/*.cpp only.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>

#include "pager/pager_impl.h"

namespace torch_offload {

/// The pages that one pin has made room for without reading them, because it will overwrite them: nobody else uses them
/// before they are confirmed. Unless they are, they end as they were before.
class Pager::Impl::Overwriting {
public:
    explicit Overwriting(Impl& pager) noexcept : pager_(pager) {}
    ~Overwriting();
    Overwriting(const Overwriting&) = delete;
    Overwriting& operator=(const Overwriting&) = delete;

    void add(Page& page) { pages_.insert(&page); }
    void drop(Page& page) { pages_.erase(&page); }
    bool has(Page& page) const { return pages_.contains(&page); }
    /// The whole pin has succeeded: what is written there counts from now on.
    void confirm() noexcept;

private:
    Impl& pager_;
    std::unordered_set<Page*> pages_;
};

/// The pager's lock, for calls of the arena that give it up. If they did, others look for memory again.
class Pager::Impl::MemoryLock {
public:
    explicit MemoryLock(Impl& pager) : pager_(pager), lock_(std::in_place, pager.mutex) {}
    ~MemoryLock();
    MemoryLock(const MemoryLock&) = delete;
    MemoryLock& operator=(const MemoryLock&) = delete;

    operator ArenaLock&() noexcept { return *lock_; }

private:
    Impl& pager_;
    std::optional<ArenaLock> lock_;
};

/// A frame that is nobody's yet: given back unless a page takes it.
class Pager::Impl::FrameHold {
public:
    FrameHold(Impl& pager, const Frame& frame) noexcept : pager_(pager), frame_(frame) {}
    ~FrameHold();
    FrameHold(const FrameHold&) = delete;
    FrameHold& operator=(const FrameHold&) = delete;

    const Frame& frame() const noexcept { return frame_; }
    /// It is a page's from now on.
    void hand_over() noexcept { frame_ = Frame{}; }

private:
    Impl& pager_;
    Frame frame_;
};

/// A thread that waits for the pager: timed, listed, and while it is one of the program's, its cores are offered to
/// updates.
class ProgramWait {
public:
    /// `page`: what it waits for, if that is one.
    ProgramWait(Pager::Impl& pager, StallCause cause, const Page* page = nullptr) noexcept;
    ~ProgramWait();
    ProgramWait(const ProgramWait&) = delete;
    ProgramWait& operator=(const ProgramWait&) = delete;

private:
    Pager::Impl& pager_;
    bool is_program_;
    StallClock stall_;
    WaitList::Entry listed_;
};

/// While one lives, reads ahead of use stand back. `threads`: the pager's count of those for whose sake.
class ReadAheadPause {
public:
    explicit ReadAheadPause(std::atomic<int>& threads) noexcept : threads_(threads) {
        threads_.fetch_add(1, std::memory_order_acq_rel);
    }
    ~ReadAheadPause() { threads_.fetch_sub(1, std::memory_order_acq_rel); }
    ReadAheadPause(const ReadAheadPause&) = delete;
    ReadAheadPause& operator=(const ReadAheadPause&) = delete;

private:
    std::atomic<int>& threads_;
};

void drop_pins(std::span<const HeldPages> pages) noexcept;

/// Private doors of the guards, for the pager's own files.
struct PageAccess {
    /// Pages that an operator is about to hold.
    static void begin(PinGuard& guard, PinTally& tally, std::size_t count) noexcept { guard.share_ = {tally, count}; }
    static void hold(PinGuard& guard, std::shared_ptr<Segment> segment, std::size_t first, std::size_t count);
    static void confirm(UpdateLatch& latch, std::optional<Pager::Impl::Transient> transient) noexcept;
    /// Pages that a thread of the program's is about to hold.
    static void begin(UpdateLatch& latch, PinTally& tally, std::size_t count) noexcept {
        latch.share_ = {tally, count, PinTally::Holder::update};
    }
    /// Makes room for `count` pages, so that each is added whatever happens.
    static void reserve(UpdateLatch& latch, std::size_t count);
    /// The page is the latch's own in its frame's slot, or writable at its address.
    static void add_here(UpdateLatch& latch, std::shared_ptr<Segment> segment, Page& page, bool is_at_address) noexcept;
    /// The page is busy and has no frame.
    static void add_below(UpdateLatch& latch, std::shared_ptr<Segment> segment, Page& page) noexcept;
    /// Leaves the pins to what the device still does with the pages. False if it does nothing with them.
    static bool keep_for_device(const UpdateLatch& latch, Pager::Impl& pager) noexcept;
    static void confirm_below(UpdateLatch& latch, UpdateLatch below);
    static void make_remote(UpdateLatch& latch) noexcept { latch.is_remote_ = true; }
};

}  // namespace torch_offload
