// The pager: four verbs over segments (pin, prefetch, mark_dirty through write pins, flush), a hard budget, and the
// threads that move pages. Layer pager: includes base, device, storage.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/activity_log.h"
#include "base/budget_ledger.h"
#include "device/memory.h"
#include "device/stream.h"
#include "pager/fault_errors.h"
#include "pager/page_holds.h"
#include "pager/page_store.h"
#include "pager/page_table.h"
#include "pager/pager_statistics.h"
#include "pager/stall_clock.h"
#include "pager/use_log.h"
#include "pager/use_predictor.h"
#include "storage/io_engine.h"

namespace torch_offload {

enum class Tier : std::uint8_t { host, device };

struct PagerOptions {
    std::size_t budget_bytes = 0;
    BudgetShare* share = nullptr;          // of a budget of several processes, outlives the pager; nullptr: no others
    Tier tier = Tier::host;                // whose memory that is
    std::vector<std::string> directories;  // on real disks; pages are spread over them
    IoEngineKind engine = IoEngineKind::automatic;
    std::size_t queue_depth = 16;  // transfers in flight
    TransferLimits transfer_limits;
    std::size_t page_elements = std::size_t{1} << 20;  // per page, a multiple of kSectorBytes
    Device* device = nullptr;  // asked whether copies have passed before memory is used; outlives the pager
    Memory* memory = nullptr;  // where frames come from, nullptr: the process's; one that is not needs a TierStore
    std::string remedy;        // what helps where it is full, for messages
    std::chrono::milliseconds longest_operator{10'000};  // who runs out waits so long for pins of other threads
    /// Deferred work is applied where the store keeps pages, not in this memory: in the tier below, or, of a host's
    /// memory, by the store's own process.
    bool updates_below = false;
    ActivityLog* activity_log = nullptr;  // told of transfers and stalls; outlives the pager
    FaultNotice fault_notice;             // told of accesses behind the dispatcher that ended on wrong bytes
};

/// overwrite: every byte will be written, what was there is not read.
enum class Access : std::uint8_t { read, write, overwrite };

struct PagerDump;

/// One thing to pin.
struct PinRequest {
    std::shared_ptr<Segment> segment;
    Access access = Access::read;
};

/// Applies what was deferred on page `index` of `segment`, and of the segments that share it, without mapping it.
/// `may_wait`: false lets it give up (returning false) when memory is short. Called without any lock of the pager;
/// must not take the GIL. Throws what a pin throws.
using ResolvePending = std::function<bool(Segment& segment, std::size_t index, bool may_wait)>;

/// The segments updated together with this one by its deferred work, itself included; empty: none.
using PendingMembers = std::function<std::vector<std::shared_ptr<Segment>>(Segment& segment)>;

/// Lock order, the only one: Pager's lock, then the predictor's or the store's queue lock, under which nothing is
/// locked. No thread holds the locks of two pagers, or one across I/O, a copy, mapping, ResolvePending or a callback;
/// page words are changed without any.
/// Threads: every public call may come from any. The store's move pages, evict ahead of need and prefetch; a service
/// thread of the pager's answers faults and applies deferred work ahead of need. None takes the GIL.
class Pager {
public:
    /// Throws: InvalidArgument for a directory or options that cannot serve; TierIoError for a read-only or full one.
    explicit Pager(const PagerOptions& options);
    /// The same over an engine of the caller's, `options.engine` aside.
    Pager(const PagerOptions& options, std::unique_ptr<IoEngine> engine);
    /// Over a tier of the caller's; `options.directories`, `engine` and `queue_depth` aside.
    Pager(const PagerOptions& options, std::unique_ptr<PageStore> store);
    ~Pager();
    Pager(const Pager&) = delete;
    Pager& operator=(const Pager&) = delete;

    /// Before the first set_pending(). Both are called without locks and outlive the pager's use of them until
    /// clear_pending_work(), which waits for calls under way.
    void set_pending_work(ResolvePending resolve, PendingMembers members);
    void clear_pending_work();

    // --- Segments -------------------------------------------------------------------------------------------------
    /// A new segment of zeros that owns no bytes yet. `element_bytes` fixes the page size.
    std::shared_ptr<Segment> create_segment(std::size_t size_bytes, std::size_t element_bytes, SegmentKind kind);
    /// Whether adopt_range() can make pages of live ranges: of memory that moves in parts.
    bool can_adopt_ranges() const noexcept;
    /// Makes a segment of the first `size_bytes` of a live range from allocate_range() without a copy: all pages
    /// mapped and dirty. The range is the segment's from now on.
    std::shared_ptr<Segment> adopt_range(std::span<std::byte> range, std::size_t size_bytes, std::size_t element_bytes,
                                         SegmentRole role);
    /// The first pages of a new segment of zeros lie in `file`, one after the other from `offset_bytes` on, until they
    /// are written: none is read now. Returns how many; those behind them, which direct reads do not reach, or all
    /// where a device computes, stay zeros.
    std::size_t set_home(Segment& segment, const std::shared_ptr<const HomeFile>& file, std::uint64_t offset_bytes);

    // --- The verbs ------------------------------------------------------------------------------------------------
    /// Brings all pages of the segments into memory, maps them and keeps them there while the guard lives.
    /// Throws: OutOfTierMemory before anything is touched if they cannot all fit; TierIoError for a read that fails now
    /// or a write-back whose memory is needed; CorruptPage for a page that is lost; what raise_fault_error() throws.
    /// Pages that were to be overwritten are then as before.
    PinGuard pin(std::span<const PinRequest> requests);
    /// The same for `count` pages of one segment.
    PinGuard pin_pages(const std::shared_ptr<Segment>& segment, std::size_t first, std::size_t count, Access access);
    PinGuard pin_ranges(const std::shared_ptr<Segment>& segment, std::span<const PageRange> ranges, Access access);
    /// A request: reads the segment, in its turn, or one page of it at once, ahead of use if memory allows.
    void prefetch(const std::shared_ptr<Segment>& segment);
    void prefetch_page(const std::shared_ptr<Segment>& segment, std::size_t index);
    /// Sends every page to SSD (clean ones are dropped) and waits for it. Returns the bytes that stay since pinned.
    std::size_t evict(const std::shared_ptr<Segment>& segment);
    /// Waits until no transfer is under way, with reads ahead of use left out; raises a failed write.
    void flush();
    /// Throws, once, why an access behind the dispatcher failed since the last pin. Such pages are tried again then.
    void raise_fault_error();
    /// Copies a page's bytes out of the tier below, past this one's memory: what is left of a lost device. False, with
    /// nothing copied, if those below are not the latest. Throws: what a pin throws.
    bool salvage(Segment& segment, std::size_t index, std::span<std::byte> target);

    // --- Deferred work --------------------------------------------------------------------------------------------
    /// Marks page `index` as having deferred work and unmaps it. Returns false, with nothing changed, while others
    /// hold it pinned: the work must then be done at once. Waits for kernels that still use it.
    bool set_pending(Segment& segment, std::size_t index);
    /// Latches page `index` of every segment for an update, loading what is missing: in this memory or, with
    /// `updates_below` and unless an address into one of them is held, where the store keeps them, sending what is
    /// here. With `may_wait` false returns an empty latch rather than wait for memory.
    UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index, bool may_wait);
    /// True if the page's bytes are in memory (mapped, or loaded without pending work elsewhere).
    static bool in_memory(const Segment& segment, std::size_t index) noexcept;

    /// Where a device copies the page from or to while it is pinned.
    std::span<std::byte> copied_range(Segment& segment, std::size_t index);

    // --- Temporaries (the CPU allocator) --------------------------------------------------------------------------
    /// A committed range of the budget; evicts pages to free memory. Throws: OutOfTierMemory; TierIoError of a write.
    std::span<std::byte> allocate_range(std::size_t size_bytes);
    void free_range(std::span<std::byte> range) noexcept;
    /// Counts memory that is about to be allocated elsewhere, like allocate_range(). If it throws, nothing was counted.
    void reserve_small(std::size_t size_bytes);
    /// Counts memory that was allocated or (below zero) freed elsewhere, whether the budget has room for it or not.
    void count_small(std::ptrdiff_t delta_bytes) noexcept;

    // --- The trace ------------------------------------------------------------------------------------------------
    TraceId new_trace_id();
    /// The segment's deferred work will be triggered by another role: a state that became a parameter's.
    void set_anchor(Segment& segment, TraceId anchor);
    void touch(const std::shared_ptr<Segment>& segment);
    /// When the segment is used next, from who knows better than the recording here: a time on a clock of its own, the
    /// same one for all segments, or kNever.
    void tell_next_use(Segment& segment, UsePosition use);
    void kick();  // looks ahead soon
    /// What the first pass of the program is thought to use, in this order; read ahead if nothing better is known.
    void expect_pass(ProgramId program, std::span<const std::shared_ptr<Segment>> segments);
    /// A pass of the program begins: its uses are predicted by those of its last one.
    void begin_pass(ProgramId program);
    void end_step();  // throws, once, TierIoError for a page that could not be written and still has to be

    // --- The tier above -------------------------------------------------------------------------------------------
    /// Segments here hold what has left another tier's memory: what is used there is the prediction, and is recorded.
    void follow(std::shared_ptr<UsePredictor> above);

    /// Lists every use of a page from now on, until taken: in the order in which they began, a drop where one ended.
    void start_use_log();
    std::vector<UseEvent> take_use_log();
    bool is_resident(const Segment& segment) const noexcept;
    PagerStatistics statistics() const;
    PagerDump dump();  // waits some seconds at most, whatever others do
    const PagerOptions& options() const noexcept { return options_; }

    struct Impl;  // the pager's parts: pager_impl.h

private:
    friend class Segment;
    friend class PinGuard;
    friend class RankWait;
    friend class UpdateLatch;
    PagerOptions options_;
    std::unique_ptr<Impl> impl_;
};

}  // namespace torch_offload
