// One engine: a pager, its recorder of deferred work, and what interception keeps about both. Layer autograd.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "autograd/collective_holds.h"
#include "autograd/compute_device.h"
#include "autograd/deferred_ops.h"
#include "autograd/gradient_buckets.h"
#include "autograd/kept_out_storages.h"
#include "autograd/mapped_copy.h"
#include "autograd/paged_storage.h"
#include "autograd/saved_copies.h"
#include "autograd/storage_uses.h"
#include "base/activity_log.h"
#include "base/budget_ledger.h"
#include "base/counters.h"
#include "device/address_space_shared.h"
#include "net/socket.h"
#include "pager/pager.h"
#include "storage/block_file.h"

namespace torch_offload {

struct EngineOptions {
    PagerOptions pager;                         // of the host's memory
    std::vector<ScratchLimits> scratch_limits;  // of each directory of pages; empty: there are none
    std::vector<NetAddress> stores;             // of pages in other processes, instead of directories; empty: none
    std::optional<DeviceTier> device;           // without one, the host's memory is compute memory
    std::size_t min_paged_bytes = 0;            // smaller tensors stay ordinary
    bool copies_checkpoints = false;            // instead of leaving pages in the files that they are loaded from
    double ssd_bytes_per_second = 0;            // to try a slower SSD; 0: as fast as it is
    std::shared_ptr<LedgerFile> ledger;         // of a budget that other processes have a share of; nullptr: no others
    std::size_t guaranteed_bytes = 0;           // of that, for this one
};

struct EngineCounters {
    Counter fallback_calls;    // operators that met a managed tensor
    Counter split_list_calls;  // list operators that ran in chunks
    Counter norms_from_cache;
    Counter gradients_applied;  // during the backward
    Counter adopted_bytes;      // became pages where they lay
    Counter copied_bytes;       // were copied into pages
    Counter home_bytes;         // became pages that lie in the file that they were mapped from
    Counter direct_bytes;       // of those copied, read past the page cache from the file that they were mapped from
    Counter zero_segments;      // made without bytes
    Counter saved_bytes;        // of activations that became pages
};

/// Kept alive by its Python object and by every block of memory it gave out.
/// Threads: any; nothing here takes the GIL, and no lock is held across a torch call.
class Engine : public std::enable_shared_from_this<Engine> {
public:
    /// Throws: what the pager's constructor and ComputeDevice::open() throw; OffloadError in a forked child.
    static std::shared_ptr<Engine> make(const EngineOptions& options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    /// Of compute memory.
    Pager& pager() noexcept { return *pager_; }
    /// Of the host's memory, the same where that is compute memory.
    Pager& host_pager() noexcept { return *host_; }
    bool has_device() const noexcept { return device_ != nullptr; }
    /// Where the module computes and its tensors are.
    c10::Device torch_device() const noexcept { return torch_device_; }
    /// Waits for writes under way in every tier; raises a failed one.
    void flush_pages();
    /// Throws, once, why an access behind the dispatcher failed in some tier.
    void raise_fault_error();
    /// Of all tiers. Off until it is started.
    ActivityLog& activity_log() noexcept { return activity_log_; }
    DeferredOps& deferred() noexcept { return *deferred_; }
    MappedCopy& mapped_copy() noexcept { return *mapped_copy_; }
    std::size_t min_paged_bytes() const noexcept { return options_.min_paged_bytes; }
    bool copies_checkpoints() const noexcept { return options_.copies_checkpoints; }
    std::size_t live_segments() const noexcept { return live_segments_.load(std::memory_order_relaxed); }

    /// Pins, and where memory is short drops dead leases, waits for collectives under way and tries again.
    PinGuard pin(std::span<const PinRequest> requests);
    PinGuard pin_pages(const std::shared_ptr<Segment>& segment, std::size_t first, std::size_t count, Access access);
    PinGuard pin_ranges(const std::shared_ptr<Segment>& segment, std::span<const PageRange> ranges, Access access);
    std::span<std::byte> allocate_range(std::size_t size_bytes);
    void reserve_small(std::size_t size_bytes);

    /// Gives back what loading keeps between two tensors.
    void finish_loading() noexcept;

    /// Manages the tensor if it is large enough and of a kind that can be. Returns whether it is managed now.
    bool try_manage(const at::Tensor& tensor, SegmentRole role);

    /// Storages that have been given other memory somewhere else, until loading has finished: tensors that shared one
    /// share the other.
    c10::Storage moved_storage(const c10::Storage& from);
    void note_moved(const c10::Storage& from, c10::Storage to);

    // --- Optimizer steps ------------------------------------------------------------------------------------------
    void begin_optimizer_step();
    /// Also the end of a recorded pass.
    void end_optimizer_step();
    /// What the first pass of the program is thought to use, in this order. As begin_pass().
    void expect_pass(ProgramId program, std::span<const std::shared_ptr<Segment>> segments);
    /// A pass begins: training, or another program, which no optimizer step ends. Any thread; nothing in a forked
    /// child, where a lock may be held for ever.
    void begin_pass(ProgramId program);
    /// The step raised before its end.
    void abandon_optimizer_step() noexcept;
    /// Whether this thread is in a step.
    bool in_optimizer_step() const noexcept;

    /// Roles that come again in every step: of the gradient of a parameter, of the n-th tensor of its kind made for a
    /// parameter in this step, and of the n-th activation of the step (for no parameter).
    enum class Derived : std::uint8_t { gradient, state, copy, temporary, activation };
    TraceId derived_role(TraceId parameter_role, Derived derived);

    /// Whether gradient norms are worth computing early: false after some steps in a row in which nobody asked.
    bool wants_norms() const noexcept { return steps_without_norms_.load(std::memory_order_relaxed) < kStepsToForget; }
    void note_norm_asked() noexcept { steps_without_norms_.store(0, std::memory_order_relaxed); }

    // --- Leases ---------------------------------------------------------------------------------------------------
    /// What a use of bare addresses that says nothing about writes does: on the host a write faults and is noticed.
    Access bare_access() const noexcept { return torch_device_.is_cpu() ? Access::read : Access::write; }
    /// Keeps the tensor's segment mapped until this very tensor object is gone (noticed at the next sweep).
    void lease(const at::Tensor& view);
    /// Returns whether any lease was dropped.
    bool sweep_leases();

    // --- Collectives ----------------------------------------------------------------------------------------------
    CollectiveHolds& collective_holds() noexcept { return collective_holds_; }
    GradientBuckets& buckets() noexcept { return buckets_; }

    // --- Activations ----------------------------------------------------------------------------------------------
    /// Where what is saved is copied into pages.
    SavedCopies& saved_copies() noexcept { return saved_copies_; }
    /// What is saved of these stays where it is.
    KeptOutStorages& kept_out() noexcept { return kept_out_; }
    /// Pins a segment that an operator is about to use without a pin of its own, until others have come after it.
    void keep_for_a_while(const std::shared_ptr<Segment>& segment);
    /// Ends that for all of them. Returns whether there were any.
    bool drop_kept();

    EngineCounters counters;

private:
    static constexpr std::uint32_t kStepsToForget = 4;  // several optimizers may each end a step of their own

    explicit Engine(const EngineOptions& options);
    friend struct BlockAccount;

    struct Lease {
        c10::weak_intrusive_ptr<c10::TensorImpl> holder;
        PinGuard guard;
        OpenStorages open;
    };
    struct Kept {
        std::size_t size_bytes = 0;
        PinGuard guard;
    };
    struct DerivedRoles {
        std::vector<TraceId> ids;
        std::size_t used = 0;
        std::uint64_t step = 0;
    };
    template <typename Attempt>
    auto with_holds_dropped(Attempt attempt);

    ActivityLog activity_log_;
    EngineOptions options_;
    std::unique_ptr<ComputeDevice> device_;  // nullptr: compute memory is the host's
    const c10::Device torch_device_;
    std::unique_ptr<BudgetShare> share_;  // of the host's memory
    std::shared_ptr<Pager> host_;
    std::shared_ptr<Pager> pager_;  // of compute memory: the same as host_ without a device
    std::unique_ptr<DeferredOps> deferred_;
    std::unique_ptr<MappedCopy> mapped_copy_;
    std::atomic<std::size_t> live_segments_{0};
    const std::uint64_t id_;  // never that of another engine
    std::atomic<std::int64_t> step_begin_ns_{0};
    std::atomic<std::uint32_t> steps_without_norms_{0};

    struct Moved {
        c10::weak_intrusive_ptr<c10::StorageImpl> from;  // keeps the address from becoming another's
        c10::Storage to;
    };
    std::mutex moved_mutex_;
    std::unordered_map<const c10::StorageImpl*, Moved> moved_;
    CollectiveHolds collective_holds_;
    GradientBuckets buckets_;
    std::mutex leases_mutex_;
    std::vector<Lease> leases_;
    SavedCopies saved_copies_;
    KeptOutStorages kept_out_;
    std::mutex kept_mutex_;
    std::deque<Kept> kept_;
    std::size_t kept_bytes_ = 0;
    std::mutex roles_mutex_;
    std::uint64_t step_ = 1;
    std::unordered_map<std::uint64_t, DerivedRoles> roles_;
};

/// Counts the segments that are alive; for paged_storage.
struct BlockAccount {
    static void add(Engine& engine) noexcept { engine.live_segments_.fetch_add(1, std::memory_order_relaxed); }
    static void remove(Engine& engine) noexcept { engine.live_segments_.fetch_sub(1, std::memory_order_relaxed); }
};

}  // namespace torch_offload
