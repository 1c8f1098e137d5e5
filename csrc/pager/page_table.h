// Pages and segments: what each page's bytes are doing, as one atomic word with named transitions.
// Layer pager: includes base, device, storage.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/wait.h"
#include "device/memory.h"
#include "storage/io_engine.h"

namespace torch_offload {

class Pager;
class Segment;

/// Where the latest bytes of a page are.
enum class PageState : std::uint32_t {
    zero,      // nowhere: all zeros, no memory and no extent
    stored,    // on SSD only
    loading,   // a frame waits for its read
    loaded,    // in a frame, not mapped: invisible to the program
    busy,      // one thread maps, unmaps, protects or updates it
    mapped,    // in a frame, at the segment's address
    evicting,  // unmapped, a write to SSD under way
    failed,    // lost: every access but one that overwrites it raises why
};
inline constexpr std::size_t kPageStateCount = 8;

/// A value of the page's word: state, flags and pins, changed only together.
struct PageWord {
    static constexpr std::uint32_t kStateMask = 0x7;
    static constexpr std::uint32_t kPoisoning = 1u << 3;  // 0xFF is being put at its address: not mapped meanwhile
    static constexpr std::uint32_t kDirty = 1u << 4;      // the frame is newer than the extent
    static constexpr std::uint32_t kWritable = 1u << 5;   // mapped for writing
    static constexpr std::uint32_t kPending = 1u << 6;    // deferred operations not yet applied; never mapped
    static constexpr std::uint32_t kFaulted = 1u << 7;    // in the queue of faults
    static constexpr std::uint32_t kFaultedWrite = 1u << 8;
    static constexpr std::uint32_t kPoisoned = 1u << 9;  // 0xFF lies at its address after an access that had to end
    static constexpr std::uint32_t kUpdateQueued = 1u << 10;  // its deferred work waits for the service thread
    static constexpr std::uint32_t kStored = 1u << 11;        // the store holds bytes of it
    static constexpr std::uint32_t kUndefined = 1u << 12;  // in memory for a pin that will overwrite it: no bytes yet
    static constexpr std::uint32_t kTransferFailed =
        1u << 13;  // a read ended without the bytes, which are stored; or a transfer is late
    static constexpr std::uint32_t kPinUnit = 1u << 14;

    std::uint32_t bits = 0;

    constexpr PageState state() const noexcept { return static_cast<PageState>(bits & kStateMask); }
    constexpr bool has(std::uint32_t flag) const noexcept { return (bits & flag) != 0; }
    constexpr std::uint32_t pin_count() const noexcept { return bits / kPinUnit; }
    constexpr bool in_memory() const noexcept { return state() == PageState::mapped || state() == PageState::loaded; }
    constexpr bool is_absent() const noexcept { return state() == PageState::zero || state() == PageState::stored; }

    constexpr PageWord with(PageState state) const noexcept {
        return {(bits & ~kStateMask) | static_cast<std::uint32_t>(state)};
    }
    constexpr PageWord with_flag(std::uint32_t flag) const noexcept { return {bits | flag}; }
    constexpr PageWord without_flag(std::uint32_t flag) const noexcept { return {bits & ~flag}; }
    constexpr PageWord pinned() const noexcept { return {bits + kPinUnit}; }
    constexpr PageWord unpinned() const noexcept { return {bits - kPinUnit}; }
};

/// Room for one page in memory. The memory lies at `slot` or, while mapped, at the page's own address.
struct Frame {
    std::span<std::byte> slot;  // empty: no frame
    BufferIndex fixed_index = kUnregistered;

    explicit operator bool() const noexcept { return !slot.empty(); }
};

/// One page. The word is atomic; the rest belongs to whoever holds the page in a state that excludes others
/// (loading, busy, evicting), or, while nobody does, to the pager's lock.
struct Page {
    std::atomic<std::uint32_t> word{static_cast<std::uint32_t>(PageState::zero)};
    Frame frame;
    Segment* segment = nullptr;
    std::atomic<Page*> next_fault{nullptr};
    std::exception_ptr error;  // why its last transfer failed or is late, or it is lost; the pager's lock covers it

    PageWord load() const noexcept { return {word.load(std::memory_order_acquire)}; }
    /// Replaces `expected` by `desired` and wakes waiters; on failure `expected` becomes the current word.
    bool change(PageWord& expected, PageWord desired) noexcept;
    /// Moves to `state` whatever the flags are; only for the holder of a state that excludes others.
    void enter(PageState state, std::uint32_t set_flags = 0, std::uint32_t clear_flags = 0) noexcept;
    void set_flag(std::uint32_t flag) noexcept;
    void clear_flag(std::uint32_t flag) noexcept;
    /// A pin keeps a page from being evicted; in a state other than mapped it says that the page is wanted.
    void add_pin() noexcept { word.fetch_add(PageWord::kPinUnit, std::memory_order_acq_rel); }
    void drop_pin() noexcept { word.fetch_sub(PageWord::kPinUnit, std::memory_order_acq_rel); }
    void wait_change(PageWord seen) const noexcept { wait_for_change(word, seen.bits); }
};

/// Pages of one segment.
struct PageRange {
    std::size_t first = 0;
    std::size_t count = 0;
};

/// What the bytes of a segment are to training.
enum class SegmentKind : std::uint8_t { parameter, gradient, state, activation, other };
inline constexpr std::size_t kSegmentKindCount = 5;

/// Number of a segment's role in the recorded order of pins; the same role has the same number in every step.
using TraceId = std::uint32_t;
inline constexpr TraceId kNoTrace = UINT32_MAX;

/// What a segment is called and where it stands in the recorded order of pins.
struct SegmentRole {
    SegmentKind kind = SegmentKind::other;
    std::string label{};
    TraceId trace_id = kNoTrace;
    TraceId anchor_id = kNoTrace;
    bool is_used_next = false;  // as after keep_for_next_use()
};

/// Why a segment stands where it does in an EvictionQueue.
struct EvictionRank {
    std::uint64_t next_use = 0;  // a UsePosition: of the trace, or what requests say
    std::uint64_t last_use = 0;  // a clock that grows; decides among equals, oldest first
};

/// The bytes of one storage, at one virtual address for life, as pages of equal size (the last may be shorter).
/// Threads: word transitions are atomic; the pager's lock covers the rest.
class Segment final : public FaultTarget, public std::enable_shared_from_this<Segment> {
public:
    Segment(Pager& pager, std::span<std::byte> range, std::size_t page_bytes, SegmentKind kind, std::uint64_t id);
    ~Segment() override;
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    std::uint64_t id() const noexcept { return id_; }
    SegmentKind kind() const noexcept { return kind_; }
    std::size_t size_bytes() const noexcept { return range_.size(); }
    std::size_t page_bytes() const noexcept { return page_bytes_; }
    std::size_t page_count() const noexcept { return page_count_; }
    std::span<std::byte> range() const noexcept { return range_; }
    Page& page(std::size_t index) noexcept { return pages_[index]; }
    const Page& page(std::size_t index) const noexcept { return pages_[index]; }
    std::size_t index_of(const Page& page) const noexcept { return static_cast<std::size_t>(&page - pages_.get()); }

    /// Whether deferred work waits on it. Pages are worked off in order, so the last one of the work tells.
    bool has_pending() const noexcept {
        return has_work_above() || pages_[worked_pages() - 1].load().has(PageWord::kPending);
    }
    /// Deferred work is on so many pages, the first ones: a storage may be padded behind its tensor.
    void set_worked_pages(std::size_t count) noexcept;
    std::size_t worked_pages() const noexcept { return worked_pages_.load(std::memory_order_relaxed); }

    /// The page's bytes at the segment's address; the memory behind them spans whole granules.
    std::span<std::byte> page_range(std::size_t index) const noexcept;
    std::size_t frame_bytes(std::size_t index) const noexcept;

    Pager& pager() const noexcept { return pager_; }

    /// The segment that holds what has left the tier's memory, in the pager below; nullptr until something has.
    std::shared_ptr<Segment> backing() const noexcept {
        return has_backing_.load(std::memory_order_acquire) ? backing_ : nullptr;
    }
    /// Once. From then on `backing`, which nobody else knows yet, sees the words of this one's pages.
    void set_backing(std::shared_ptr<Segment> backing) noexcept;
    /// Of a backing segment: whether the tier above has the page in memory, and will not ask for it soon.
    bool is_above(std::size_t index) const noexcept { return above_ && above_[index].load().in_memory(); }
    /// Of a backing segment: whether deferred work waits on the one above.
    bool has_work_above() const noexcept { return above_ && above_[worked_pages() - 1].load().has(PageWord::kPending); }

    /// Before the segment is shared and has pages in memory. `role.kind` aside, which it has from its beginning.
    void assume(SegmentRole role);

    /// Until end_next_use(), only who cannot get memory otherwise sends its pages away. The pager does not rank the
    /// segment anew by either; touch() does.
    void keep_for_next_use() noexcept { outstanding_since.store(1, std::memory_order_relaxed); }
    void end_next_use() noexcept { outstanding_since.store(0, std::memory_order_relaxed); }

    void resolve_fault(std::byte* address, bool is_write) noexcept override;

    /// For messages: "parameter model.layers.3.mlp.up_proj.weight". Set before the segment is shared.
    std::string label;
    /// The segment's own role in the trace, and the role whose use triggers its deferred work (a parameter's).
    TraceId trace_id = kNoTrace;
    std::atomic<TraceId> anchor_id{kNoTrace};
    /// The same number for segments that updates use together, as far as is known when they are made: of the
    /// parameter's role, else the segment's own. It stays.
    std::uint64_t family;
    /// Deferred operations, owned by the layer above; nullptr: none. Guarded by that layer.
    std::shared_ptr<void> deferred;
    /// When it was last pinned, on the pager's clock.
    std::atomic<std::uint64_t> last_use{0};
    /// When a caller last said that it is used soon, on that clock; 0: that does not hold any more.
    std::atomic<std::uint64_t> outstanding_since{0};
    /// So many uses without such a word, and callers are not expected to say it again. 0: they are not.
    std::atomic<std::uint32_t> requested_uses{0};
    /// What tell_next_use() said, on a clock of the caller's; 0: nothing.
    std::atomic<std::uint64_t> told_use{0};
    /// Whether it is written down only when asked for: memory is not made by sending it away.
    bool stays = false;
    /// Its place in the queue of what could go, if it is there. The pager's lock covers it.
    std::optional<EvictionRank> eviction_rank;

private:
    Pager& pager_;
    std::span<std::byte> range_;
    std::size_t page_bytes_;
    SegmentKind kind_;
    std::uint64_t id_;
    std::size_t page_count_;
    std::atomic<std::size_t> worked_pages_{page_count_};
    std::shared_ptr<Page[]> pages_;        // shared with the backing segment, which only loads words
    std::shared_ptr<const Page[]> above_;  // of the segment that this one is the backing segment of
    std::shared_ptr<Segment> backing_;     // as it is from when has_backing_ is set
    std::atomic<bool> has_backing_{false};
};

}  // namespace torch_offload
