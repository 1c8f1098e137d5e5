// One budget for everything in compute memory: frames of pages and ranges of temporaries.
// Layer pager: includes base, device, storage.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pager/page_table.h"
#include "pager/range_heap.h"

namespace torch_offload {

/// What the budget is spent on, in bytes of memory. The sum never exceeds the limit.
struct ArenaUsage {
    std::size_t limit_bytes = 0;
    std::size_t most_limit_bytes = 0;  // that it ever was: of a budget that processes share it changes
    std::size_t frame_bytes = 0;       // frames that hold pages
    std::size_t free_frame_bytes = 0;  // frames kept for the next page
    std::size_t range_bytes = 0;       // live temporaries
    std::size_t idle_range_bytes = 0;  // freed temporaries kept for reuse
    std::size_t small_bytes = 0;       // small allocations, counted a quantum ahead
    std::size_t reserve_bytes = 0;     // kept free for small allocations to come
    std::size_t peak_bytes = 0;

    std::size_t used_bytes() const noexcept {
        return frame_bytes + free_frame_bytes + range_bytes + idle_range_bytes + small_bytes;
    }
    /// What pages and temporaries could have at once, without evicting a page.
    std::size_t available_bytes() const noexcept { return left_of_limit(reserve_bytes); }
    /// The same for small allocations, which the reserve is for.
    std::size_t available_small_bytes() const noexcept { return left_of_limit(0); }

private:
    std::size_t left_of_limit(std::size_t kept_bytes) const noexcept {
        const std::size_t fixed = frame_bytes + range_bytes + small_bytes + kept_bytes;
        return fixed >= limit_bytes ? 0 : limit_bytes - fixed;
    }
};

/// What an arena hands out.
struct ArenaOptions {
    std::size_t limit_bytes = 0;
    std::size_t reserve_bytes = 0;  // of it, for small allocations that an operation makes while its pages are pinned
    std::size_t page_bytes = 0;  // of the largest elements: what idle ranges of huge pages become, or a half or quarter
    HugePages huge_pages = HugePages::allowed;
    Memory* memory = nullptr;  // where it comes from; nullptr: the process's
};

/// The lock that covers an arena, for calls that give it up while the system maps, moves or unmaps memory: before and
/// after such a call, what the lock covers may be two things.
class [[nodiscard]] ArenaLock {
public:
    explicit ArenaLock(std::mutex& mutex) : lock_(mutex) {}
    /// Whether it was given up: there may be memory that others did not find before.
    bool was_given_up() const noexcept { return was_given_up_; }

private:
    friend class Arena;
    std::unique_lock<std::mutex> lock_;
    bool was_given_up_ = false;
};

/// Hands out memory under a hard limit. Ranges are parts of larger blocks, which are divided and joined without the
/// system; those of whole huge pages are blocks of their own and reused by exact size, as are frames. Where the budget
/// is used up, ranges are put together from free frames, and idle ranges taken apart into frames, because new memory
/// has to be zeroed by the system (and, in a virtual machine, found by its host: ten times slower). What fits neither
/// way is given back to the system to free memory, as is what there is no memory to remember. Nothing here waits or
/// evicts.
/// Memory is counted before the system is asked for it, and until the system has it back.
/// Threads: none; the pager's lock covers it, but for the system's calls, which only those that take an ArenaLock make.
class Arena {
public:
    explicit Arena(const ArenaOptions& options);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// A frame of `size_bytes` (whole sectors) with unspecified contents, or nothing when the budget is full.
    std::optional<Frame> try_take_frame(std::size_t size_bytes, ArenaLock& lock);
    void give_frame(const Frame& frame, ArenaLock& lock) noexcept;
    /// Frames of that size will be wanted.
    void note_wanted(std::size_t size_bytes) noexcept;
    /// Makes a free frame of the usual size, of new memory that the system has cleared. False: that would leave less
    /// than `kept_bytes` of the limit.
    bool add_free_frame(std::size_t kept_bytes, ArenaLock& lock);
    /// The frame's memory was not in its slot, which the caller has released, and will not come back.
    void give_up_frame(const Frame& frame) noexcept;

    /// A committed range of `size_bytes` with unspecified contents that a fork shares, or nothing.
    std::optional<std::span<std::byte>> try_take_range(std::size_t size_bytes, ArenaLock& lock);
    void give_range(std::span<std::byte> range, ArenaLock& lock) noexcept;
    /// Whether the addresses of a segment were a live range's.
    bool has_range(std::span<std::byte> range) const noexcept { return ranges_.is_taken(range); }
    /// A segment's addresses with their memory, for each page of which return_to_range() has been called.
    void take_back(std::span<std::byte> range, ArenaLock& lock) noexcept;
    /// Addresses that were a live range's, whose memory is elsewhere.
    void take_addresses_back(std::span<std::byte> range, ArenaLock& lock) noexcept;
    /// Turns a slot's size of a live range into a frame whose memory stays where it is. `slot`: reserved addresses.
    Frame adopt_into_frame(std::span<std::byte> slot) noexcept;
    /// The reverse: the frame's memory lies in a range, which is live again; the caller has released its slot.
    void return_to_range(const Frame& frame) noexcept;

    /// Counts bytes allocated elsewhere if they fit the limit, giving free memory back where they need it.
    bool try_count_small(std::size_t size_bytes, ArenaLock& lock);
    /// Counts bytes allocated (or, below zero, freed) elsewhere, whether they fit or not.
    void count_small(std::ptrdiff_t delta_bytes) noexcept;

    void raise_limit(std::size_t size_bytes) noexcept;
    /// Gives free memory back to the system for a limit that is `size_bytes` lower. False, with the limit as it was, if
    /// there is not as much, or none that is not registered.
    bool lower_limit(std::size_t size_bytes, ArenaLock& lock);

    /// A frame of that size, in use, is about to be registered with the I/O engine; each that is given as registered
    /// was expected. False: it cannot be.
    bool expect_registered(std::size_t size_bytes) noexcept;
    /// It was not.
    void forget_registered(std::size_t size_bytes) noexcept;
    /// Free frames that the I/O engine has registered: only its owner may take them, to unregister them and give them.
    std::vector<Frame> take_registered_free_frames(std::size_t at_least_bytes);

    ArenaUsage usage() const noexcept { return usage_; }
    /// Whether a call has given up the lock: free memory may be on its way from one use to another.
    bool is_changing() const noexcept { return changes_ != 0; }

    /// The most that temporaries and small allocations took together since the last call.
    std::size_t take_other_peak_bytes() noexcept {
        return std::exchange(other_peak_bytes_, usage_.range_bytes + usage_.small_bytes);
    }
    /// The same for the list of uses, which keeps its own account.
    std::size_t take_logged_peak_bytes() noexcept {
        return std::exchange(logged_peak_bytes_, usage_.range_bytes + usage_.small_bytes);
    }

private:
    class SystemCalls;
    using Frames = std::multimap<std::size_t, Frame>;  // by size
    /// Memory that nobody finds, of which a range is put together.
    struct Sources {
        Frames frames;
        std::vector<std::span<std::byte>> parts;
        std::size_t missing_bytes = 0;
    };

    bool has_space(std::size_t size_bytes, std::size_t reserve_bytes) const noexcept;
    bool make_space(std::size_t size_bytes, std::size_t reserve_bytes, ArenaLock& lock);
    void release(std::span<std::byte> memory, std::size_t& account, ArenaLock& lock) noexcept;
    bool release_part(std::span<std::byte> part, ArenaLock& lock) noexcept;
    bool release_idle(std::size_t wanted_bytes, ArenaLock& lock);
    RangeHeap::Division division_of(std::size_t size_bytes) const noexcept;
    void count_block(std::size_t block_bytes, std::size_t size_bytes) noexcept;
    void give_block_up(std::span<std::byte> block, std::size_t size_bytes, ArenaLock& lock) noexcept;
    std::optional<std::span<std::byte>> divide_free_frame(std::size_t size_bytes, ArenaLock& lock);
    std::optional<std::span<std::byte>> take_idle_range(std::size_t size_bytes);
    bool add_frame_to(Sources& sources, RangeHeap::Division division) noexcept;
    bool add_part_to(Sources& sources);
    std::optional<Sources> gather(std::size_t block_bytes, RangeHeap::Division division, ArenaLock& lock);
    std::span<std::byte> make_block(const Sources& sources, std::size_t block_bytes, std::size_t size_bytes,
                                    ArenaLock& lock);
    void put_back(Sources& sources) noexcept;
    bool take_apart(std::size_t frame_bytes, ArenaLock& lock);
    bool take_frame_apart(std::size_t frame_bytes, ArenaLock& lock);
    std::optional<Frame> take_free_frame(std::size_t size_bytes);
    Frame take_new_frame(std::size_t size_bytes, ArenaLock& lock);
    std::optional<Frame> take_registered_frame(std::size_t size_bytes);
    std::optional<std::size_t> index_of_page_size(std::size_t size_bytes) const noexcept;
    std::size_t usual_frame_bytes() const noexcept;
    void charge(std::size_t& account, std::size_t size_bytes) noexcept;

    // Without the lock.
    Frame make_frame(std::size_t size_bytes);
    Frame move_into_frame(std::span<std::byte> range);
    Frames make_frames_of(std::span<std::byte> range, std::size_t frame_bytes, std::exception_ptr& error) noexcept;
    std::span<std::byte> put_together(const Sources& sources, std::size_t size_bytes, HugePages huge_pages);

    ArenaUsage usage_;
    std::size_t other_peak_bytes_ = 0;
    std::size_t logged_peak_bytes_ = 0;
    std::size_t page_bytes_;
    std::array<std::size_t, 3> wanted_bytes_{};  // of frames, lately: of the largest pages, their half, their quarter
    HugePages huge_pages_;
    Memory& memory_;
    std::size_t changes_ = 0;  // calls that have given up the lock
    Frames free_frames_;
    Frames registered_free_frames_;
    Frames registered_in_use_;  // an entry each, which gets its frame when that is given
    RangeHeap ranges_;
};

}  // namespace torch_offload
