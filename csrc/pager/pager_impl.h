// The pager's parts and how they share state. Included by csrc/pager/*.cpp only.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "pager/eviction.h"
#include "pager/fault_errors.h"
#include "pager/fault_holds.h"
#include "pager/outlook.h"
#include "pager/page_steps.h"
#include "pager/pager.h"
#include "pager/prefetch_queue.h"
#include "pager/service_thread.h"
#include "pager/unwritable_pages.h"
#include "pager/wait_list.h"

namespace torch_offload {
class SharedBudget;
inline std::int64_t steady_ns() noexcept { return std::chrono::steady_clock::now().time_since_epoch().count(); }

struct Pager::Impl final : StoreClient {
    Impl(Pager& owner, const PagerOptions& options, std::unique_ptr<PageStore> store);
    ~Impl() override;

    /// Says that this thread holds pages or memory only for a moment: others wait for it rather than run out.
    class Transient {
    public:
        explicit Transient(Impl& pager) : pager_(&pager) { pager.transients.fetch_add(1, std::memory_order_acq_rel); }
        Transient(Transient&& other) noexcept : pager_(std::exchange(other.pager_, nullptr)) {}
        ~Transient() {
            if (pager_) pager_->end_transient();
        }
        void hand_over() noexcept { pager_ = nullptr; }  // somebody else calls end_transient()

    private:
        Impl* pager_;
    };
    void end_transient() noexcept;
    /// The memory behind `bytes`: mapping and direct I/O know whole granules only.
    std::span<std::byte> whole_granules(std::span<std::byte> bytes) const noexcept;
    std::size_t whole_granules(std::size_t size_bytes) const noexcept;

    // Segments (pager.cpp)
    void check_page_size(std::size_t element_bytes) const;
    std::shared_ptr<Segment> make_segment(std::span<std::byte> range, std::size_t page_bytes, SegmentKind kind);
    void take_out_of_segment(Page& page) noexcept;
    std::vector<std::span<std::byte>> reserve_slots(std::span<std::byte> range, std::size_t page_bytes);
    void adopt_pages(Segment& segment, std::span<const std::span<std::byte>> slots);
    void forget(Segment& segment) noexcept;
    void log_use(const Segment& segment, std::size_t first, std::size_t count, UseKind kind) noexcept;
    void raise_page_error(const Page& page);

    // Errors (pager_transfer.cpp)
    void forget_error(Page& page) noexcept;
    void raise_fault_error();
    void raise_unsaid_write_error();
    void raise_write_error(const Segment* segment = nullptr);
    void raise_if_late(const Page& page, PageWord seen);
    void raise_late_error();
    bool end_lateness(Page& page) noexcept;

    // Uses that outlive their guards (in_flight_uses.cpp)
    std::shared_ptr<const Event> fence_use() noexcept;
    void end_use(InFlightUse use) noexcept;
    void close_use(const InFlightUse& use) noexcept;
    bool close_passed_uses() noexcept;
    bool wait_for_oldest_use();

    // Memory (pager_memory.cpp)
    Frame acquire_frame(std::size_t size_bytes);
    std::optional<Frame> try_acquire_frame(std::size_t size_bytes, UsePosition keep_before);
    void make_frame_ahead();
    std::span<std::byte> acquire_range(std::size_t size_bytes);
    void acquire_small(std::size_t size_bytes);
    template <typename Take, typename Available>
    auto acquire(std::size_t size_bytes, Take take, Available available);
    struct Victim {
        std::shared_ptr<Segment> segment;
        Page* page = nullptr;
    };
    enum class Resting : std::uint8_t { not_yet, too };  // whether pages are tried that UnwritablePages leaves alone
    std::size_t lease(std::size_t size_bytes) noexcept;
    std::size_t evict_for(std::size_t wanted_bytes, UsePosition keep_before, Resting resting = Resting::not_yet);
    std::vector<Victim> choose_victims(std::size_t wanted_bytes, UsePosition keep_before, Resting resting);
    bool evict_page(Page& page);
    void announce_progress() noexcept;
    void check_idle(std::span<const std::byte> memory) noexcept;
    void retire_frame(Page& page) noexcept;
    void end_move(std::size_t left_bytes) noexcept;
    bool is_anything_moving() const noexcept;
    bool is_of_device() const noexcept { return options.tier == Tier::device; }
    const char* tier_name() const noexcept { return is_of_device() ? "device" : "host"; }
    const char* budget_name() const noexcept { return is_of_device() ? "`gpu`" : "`ram`"; }
    [[noreturn]] void raise_out_of_memory(std::size_t wanted_bytes);

    // Moves (pager_moves.cpp)
    class Overwriting;
    void start_load(Page& page, PageGoal goal, Overwriting* own = nullptr);
    class FrameHold;
    class MemoryLock;
    void begin_read(Page& page);
    bool load_into(Page& page, PageGoal goal, FrameHold& frame);
    void map_page(Page& page, PageWord before, bool is_write);
    void make_writable(Page& page);
    void unmap_page(Page& page);
    void drop_or_write(Page& page);
    void drop_page(Page& page) noexcept;
    void lose_page(Page& page, const char* why) noexcept;
    void undo_overwrite(Page& page) noexcept;
    std::span<std::byte> mapped_range(const Page& page) const noexcept;

    // Access (pager_access.cpp)
    /// place: the page is where the goal says. end: this thread brought it there, and an update or a handover has it.
    enum class Reached : std::uint8_t { nothing, place, end };
    Reached advance(Page& page, PageGoal goal, Patience patience, Overwriting* own = nullptr);
    bool move_on(Page& page, PageWord before, PageGoal goal);
    void wait_for_others(const Page& page, PageWord seen);
    void wait_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen, const InterruptibleWait& wait);
    bool wait_slice(const std::atomic<std::uint32_t>& word, std::uint32_t seen, const InterruptibleWait& wait,
                    std::chrono::milliseconds limit);
    std::size_t page_capacity_bytes();
    void check_fits(std::span<const PinRequest> requests);
    void start_missing(const std::shared_ptr<Segment>& segment, PageRange pages, Access access, Overwriting& own);
    void map_pages(Segment& segment, PageRange pages, Access access, Overwriting& own);
    UpdateLatch latch_here(std::span<const std::shared_ptr<Segment>> segments, std::size_t index, Patience patience);

    // Updates in the tier below (pager_below.cpp)
    std::optional<UpdateLatch> latch_below(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                           Patience patience);
    bool start_update_below(const std::shared_ptr<Segment>& segment, std::size_t index, UpdateTime time);
    void queue_update(const std::shared_ptr<Segment>& segment, std::size_t index, UpdateTime time);
    void drop_outdated_below(const Page& page) noexcept;
    void drop_outdated(Page& page) noexcept;
    bool resolve_pending(Segment& segment, std::size_t index, bool may_wait);
    std::vector<std::shared_ptr<Segment>> members_of(Segment& segment);
    void answer_fault(Page& page, bool is_write) noexcept;
    void serve_fault(Page& page);
    void poison_page(Page& page, std::exception_ptr error, const char* why) noexcept;
    void clear_poison();
    void clear_poison(Page& page);
    void hold_faulted(Page& page) noexcept;
    void start_from_fault(const std::shared_ptr<Segment>& segment, std::size_t index, PageGoal goal);
    bool release_faulted() noexcept;
    bool release_faulted(const Segment& segment) noexcept;

    // Prediction (pager_plan.cpp)
    UsePosition next_use(const Segment& segment, const UsePredictor::Held& uses) const;
    void rank(Segment& segment, const UsePredictor::Held& uses);
    void rank_again(std::span<const std::shared_ptr<Segment>> changed);
    void rank_all(const UsePredictor::Held& uses);
    void rank_used_above();
    void note_anchor(Segment& segment, TraceId anchor);
    std::vector<std::shared_ptr<Segment>> updated_above(const Segment& segment);
    void rank_updated(std::span<const std::shared_ptr<Segment>> updated);
    Outlook upcoming_segments();
    void find_slack(std::vector<Ahead>& ahead);
    std::size_t missing_bytes(Segment& segment);
    std::size_t spare_bytes();
    std::size_t most_reads_ahead(std::size_t page_bytes, std::size_t share) const noexcept;
    void keep_free(std::size_t free_bytes, UsePosition keep_before);
    void read_what_is_due();
    void end_requests(std::uint64_t time);
    void read_requested();
    bool read_wanted(const std::shared_ptr<Segment>& segment);
    bool start_reading(const std::shared_ptr<Segment>& segment, std::size_t index, UsePosition use);
    bool read_ahead(const std::shared_ptr<Segment>& segment, UsePosition use, UpdateTime time);
    bool read_ahead_for_above(std::span<const std::shared_ptr<Segment>> updated, std::size_t index, UsePosition use);
    bool read_ahead_page(const std::shared_ptr<Segment>& segment, std::size_t index, UsePosition use);
    bool read_ahead_update(const std::shared_ptr<Segment>& segment, std::size_t index, UsePosition use,
                           UpdateTime time);
    void kick_if_due() noexcept;

    // StoreClient (pager_transfer.cpp)
    void note_transfer(const Page& page, IoDirection direction, std::int64_t begin_ns) noexcept;
    void end_read(const std::shared_ptr<Segment>& segment, Page& page, const TransferEnd& end) noexcept override;
    void end_write(Page& page, const TransferEnd& end) noexcept override;
    void note_late(Page& page, IoDirection direction, std::exception_ptr error) noexcept override;
    std::vector<Frame> frames_to_unregister() override;
    void take_unregistered(const Frame& frame) noexcept override;
    bool begin_registration(std::size_t size_bytes) noexcept override;
    void end_registration(std::size_t size_bytes, bool is_registered) noexcept override;
    void look_ahead() noexcept override;
    std::shared_ptr<UsePredictor> use_predictor() const override { return predictor; }

    Pager& owner;
    const PagerOptions& options;
    Memory& memory;
    FaultErrors fault_errors;

    mutable std::mutex mutex;  // the pager's lock: arena, queue, segments, roles, errors
    Arena arena;
    std::shared_ptr<UsePredictor> predictor = std::make_shared<UsePredictor>();
    bool follows = false;                  // what the program uses in the tier above
    std::uint64_t ranked_predictions = 0;  // what the queue is in order by: the predictor's count of predictions
    std::size_t ranked_uses = 0;           // and of uses in the running pass
    EvictionQueue evictable;               // every segment that has pages in memory, and some that have none any more
    std::unordered_map<Segment*, std::weak_ptr<Segment>> segments;
    std::vector<std::weak_ptr<Segment>> roles;                                  // by TraceId
    std::unordered_map<TraceId, std::vector<std::weak_ptr<Segment>>> anchored;  // of a tier below: by their anchors
    PrefetchQueue prefetch_queue;                                               // of callers of prefetch()
    UnwritablePages unwritable;
    FaultHolds fault_holds;
    std::exception_ptr late_error;  // of the transfer that became late last
    std::size_t unregister_wanted_bytes = 0;
    std::size_t registered_bytes = 0;
    std::uint64_t next_segment_id = 1;

    InFlightUses uses;
    std::shared_mutex pending_mutex;  // held shared while the callbacks run, so that they can be cleared safely
    ResolvePending resolve;
    PendingMembers members;

    std::atomic<std::uint32_t> progress{0};  // grows whenever memory or a page may have become available
    std::atomic<int> transients{0};          // latches, wanted or held, of threads that give up rather than wait
    std::atomic<int> memory_waiters{0}, flushers{0};  // threads before which reads ahead of use stand back
    std::atomic<int> program_waiters{0};  // threads of the program that wait: their cores are free for updates
    std::atomic<std::uint64_t> clock{1};
    std::atomic<std::size_t> moving_pages{0}, late_pages{0};  // loading or evicting, each ends with progress; some late
    std::atomic<std::size_t> evicting_bytes{0};               // memory that writes under way, and not late, will free
    std::atomic<std::int64_t> last_kick_ns{0};
    UseLog use_log;
    PinTally tally;
    Counter misses, faults, evictions, clean_drops, prefetches;
    Counter read_bytes[kSegmentKindCount], written_bytes[kSegmentKindCount];
    const std::shared_ptr<StallTotals> stalls = std::make_shared<StallTotals>();
    Counter own_updates;  // nanoseconds in which threads of the program applied deferred work
    WaitList waits;

    std::unique_ptr<SharedBudget> shared;  // nullptr: the budget is this process's alone
    std::unique_ptr<PageStore> store;
    std::unique_ptr<ServiceThread> service;
};

}  // namespace torch_offload
