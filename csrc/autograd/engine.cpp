#include "autograd/engine.h"

#include <utility>

#include "autograd/dispatch_pager.h"
#include "autograd/encoded_work.h"
#include "autograd/forked_child.h"
#include "base/check.h"
#include "pager/divided_store.h"
#include "pager/ssd_store.h"
#include "pager/tier_store.h"
#include "storage/throttled_engine.h"

namespace torch_offload {

std::shared_ptr<Engine> Engine::make(const EngineOptions& options) {
    watch_forks();
    OFFLOAD_CHECK(!in_forked_child(), OffloadError,
                  "an engine cannot be made in a forked child of a process that has one; start the child with the "
                  "spawn method");
    cover_composite_operators();
    return std::shared_ptr<Engine>(new Engine(options));
}

namespace {

constexpr std::size_t kMaxDerivedRoles = std::size_t{1} << 16;  // of one kind for one parameter, and of activations
constexpr std::size_t kMaxKept = 4;                             // activations that the operator saving them still uses
constexpr std::size_t kKeptShare = 16;                          // and at most one part in so many of the budget

constexpr std::size_t kWidestElementBytes = 4;  // of pages that many have

constexpr std::uint64_t kNoEngine = 0;
std::atomic<std::uint64_t> last_engine_id{kNoEngine};

/// The engine that this thread is in an optimizer step of.
thread_local std::uint64_t stepping_engine = kNoEngine;

EngineOptions with_log(EngineOptions options, ActivityLog& log) {
    options.pager.activity_log = &log;
    return options;
}

std::unique_ptr<BudgetShare> take_share(const EngineOptions& options) {
    if (!options.ledger) return nullptr;
    return std::make_unique<BudgetShare>(options.ledger->page(), options.guaranteed_bytes,
                                         options.pager.longest_operator);
}

/// Of what leaves the host's memory. `host` learns whether updates are applied there.
std::unique_ptr<PageStore> make_store(const EngineOptions& options, PagerOptions& host) {
    if (!options.stores.empty()) {
        const std::string kernels = options.device ? std::string() : kernels_here();
        auto divided = std::make_unique<DividedStore>(options.stores, host.page_elements * kWidestElementBytes,
                                                      host.queue_depth, host.transfer_limits, kernels);
        host.updates_below = divided->runs_work();
        return divided;
    }
    std::unique_ptr<IoEngine> engine = make_io_engine(host.engine, host.queue_depth);
    if (options.ssd_bytes_per_second > 0) {
        engine = std::make_unique<ThrottledEngine>(std::move(engine), options.ssd_bytes_per_second);
    }
    return std::make_unique<SsdStore>(host.directories, std::move(engine), host.transfer_limits,
                                      options.scratch_limits);
}

std::shared_ptr<Pager> make_host_pager(const EngineOptions& options, BudgetShare* share, ComputeDevice* device) {
    PagerOptions host = options.pager;
    host.share = share;
    if (device) {
        host.device = &device->device();
        host.memory = device->host_memory();
    }
    std::unique_ptr<PageStore> store = make_store(options, host);
    return std::make_shared<Pager>(host, std::move(store));
}

std::shared_ptr<Pager> make_compute_pager(const EngineOptions& options, const std::shared_ptr<Pager>& host,
                                          ComputeDevice* device) {
    if (!device) return host;
    PagerOptions compute = options.pager;
    compute.device = &device->device();
    compute.memory = device->memory();
    compute.tier = Tier::device;
    compute.budget_bytes = options.device->budget_bytes;
    compute.updates_below = options.device->updates_on_host;
    return std::make_shared<Pager>(
        compute, std::make_unique<TierStore>(*host, device->device(), options.device->activations_stay_on_host));
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(with_log(options, activity_log_)),
      device_(options.device ? ComputeDevice::open(*options.device) : nullptr),
      torch_device_(device_ ? device_->torch_device() : c10::Device(c10::kCPU)),
      share_(take_share(options_)),
      host_(make_host_pager(options_, share_.get(), device_.get())),
      pager_(make_compute_pager(options_, host_, device_.get())),
      deferred_(std::make_unique<DeferredOps>(pager_, torch_device_)),
      mapped_copy_(std::make_unique<MappedCopy>(*this)),
      id_(last_engine_id.fetch_add(1) + 1) {
    pager_->set_pending_work([this](Segment& segment, std::size_t index,
                                    bool may_wait) { return deferred_->resolve(segment, index, may_wait); },
                             [this](Segment& segment) { return deferred_->members(segment); });
}

Engine::~Engine() {
    mapped_copy_->finish();
    leases_.clear();
    drop_kept();
    pager_->clear_pending_work();
    deferred_.reset();
}

// --- Memory -------------------------------------------------------------------------------------------------------

template <typename Attempt>
auto Engine::with_holds_dropped(Attempt attempt) {
    while (true) {
        try {
            return attempt();
        } catch (const OutOfTierMemory&) {
            const bool had_leases = sweep_leases();
            if (!drop_kept() && !had_leases && !collective_holds_.wait_for_one()) throw;
        }
    }
}

PinGuard Engine::pin(std::span<const PinRequest> requests) {
    if (device_) device_->device().check_use();
    return with_holds_dropped([&] { return pager_->pin(requests); });
}

PinGuard Engine::pin_pages(const std::shared_ptr<Segment>& segment, std::size_t first, std::size_t count,
                           Access access) {
    if (device_) device_->device().check_use();
    return with_holds_dropped([&] { return pager_->pin_pages(segment, first, count, access); });
}

PinGuard Engine::pin_ranges(const std::shared_ptr<Segment>& segment, std::span<const PageRange> ranges, Access access) {
    if (device_) device_->device().check_use();
    return with_holds_dropped([&] { return pager_->pin_ranges(segment, ranges, access); });
}

std::span<std::byte> Engine::allocate_range(std::size_t size_bytes) {
    return with_holds_dropped([&] { return pager_->allocate_range(size_bytes); });
}

void Engine::reserve_small(std::size_t size_bytes) {
    with_holds_dropped([&] { pager_->reserve_small(size_bytes); });
}

void Engine::flush_pages() {
    pager_->flush();
    if (has_device()) host_->flush();
}

void Engine::raise_fault_error() {
    pager_->raise_fault_error();
    if (has_device()) host_->raise_fault_error();
}

bool Engine::try_manage(const at::Tensor& tensor, SegmentRole role) {
    if (block_of(tensor)) {
        add_paged_keys(tensor);
        return true;
    }
    if (!is_manageable(*this, tensor) || tensor.nbytes() < options_.min_paged_bytes) return false;
    manage(shared_from_this(), tensor, std::move(role));
    return true;
}

c10::Storage Engine::moved_storage(const c10::Storage& from) {
    const std::lock_guard lock(moved_mutex_);
    const auto found = moved_.find(from.unsafeGetStorageImpl());
    return found == moved_.end() ? c10::Storage() : found->second.to;
}

void Engine::note_moved(const c10::Storage& from, c10::Storage to) {
    const std::lock_guard lock(moved_mutex_);
    moved_.insert_or_assign(from.unsafeGetStorageImpl(), Moved{from.getWeakStorageImpl(), std::move(to)});
}

void Engine::finish_loading() noexcept {
    mapped_copy_->finish();
    std::unordered_map<const c10::StorageImpl*, Moved> moved;  // outlives the lock: it may hold the last owner
    const std::lock_guard lock(moved_mutex_);
    moved.swap(moved_);
}

// --- Activations --------------------------------------------------------------------------------------------------

void Engine::keep_for_a_while(const std::shared_ptr<Segment>& segment) {
    const PinRequest request{segment, Access::read};
    Kept kept{segment->size_bytes(), pager_->pin({&request, 1})};
    kept.guard.keep();
    pager_->touch(segment);
    std::deque<Kept> ended;  // outlives the lock
    const std::lock_guard lock(kept_mutex_);
    kept_bytes_ += kept.size_bytes;
    kept_.push_back(std::move(kept));
    while (kept_.size() > kMaxKept || (kept_.size() > 1 && kept_bytes_ > pager_->options().budget_bytes / kKeptShare)) {
        kept_bytes_ -= kept_.front().size_bytes;
        ended.push_back(std::move(kept_.front()));
        kept_.pop_front();
    }
}

bool Engine::drop_kept() {
    std::deque<Kept> ended;  // outlives the lock
    const std::lock_guard lock(kept_mutex_);
    ended.swap(kept_);
    kept_bytes_ = 0;
    return !ended.empty();
}

// --- Optimizer steps ----------------------------------------------------------------------------------------------

bool Engine::in_optimizer_step() const noexcept { return stepping_engine == id_; }

void Engine::abandon_optimizer_step() noexcept { stepping_engine = kNoEngine; }

void Engine::begin_optimizer_step() {
    stepping_engine = id_;
    step_begin_ns_.store(activity_now_ns(), std::memory_order_relaxed);
    sweep_leases();
}

void Engine::end_optimizer_step() {
    stepping_engine = kNoEngine;
    steps_without_norms_.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard lock(roles_mutex_);
        ++step_;
    }
    sweep_leases();
    finish_loading();
    if (activity_log_.is_on()) {
        activity_log_.add(
            {ActivityLane::optimizer_step, step_begin_ns_.load(std::memory_order_relaxed), activity_now_ns()});
    }
    pager_->end_step();
}

void Engine::expect_pass(ProgramId program, std::span<const std::shared_ptr<Segment>> segments) {
    if (!in_forked_child()) pager_->expect_pass(program, segments);
}

void Engine::begin_pass(ProgramId program) {
    if (!in_forked_child()) pager_->begin_pass(program);
}

TraceId Engine::derived_role(TraceId parameter_role, Derived derived) {
    const std::uint64_t key = (std::uint64_t{parameter_role} << 8) | static_cast<std::uint64_t>(derived);
    const std::lock_guard lock(roles_mutex_);
    DerivedRoles& roles = roles_[key];
    if (derived == Derived::gradient || roles.step != step_) {
        roles.used = 0;
        roles.step = step_;
    }
    if (roles.used == kMaxDerivedRoles) return kNoTrace;  // no optimizer steps, and so no step ends
    if (roles.used == roles.ids.size()) roles.ids.push_back(pager_->new_trace_id());
    return roles.ids[roles.used++];
}

// --- Leases -------------------------------------------------------------------------------------------------------

void Engine::lease(const at::Tensor& view) {
    Block* block = block_of(view);
    if (!block) return;
    block->is_raw_exposed.store(true, std::memory_order_relaxed);
    const PinRequest request{block->segment, bare_access()};
    Lease lease{c10::weak_intrusive_ptr<c10::TensorImpl>(view.getIntrusivePtr()), pin({&request, 1}), {}};
    lease.guard.keep();
    lease.open.open(view);
    const std::lock_guard lock(leases_mutex_);
    leases_.push_back(std::move(lease));
}

bool Engine::sweep_leases() {
    const bool had_works = collective_holds_.sweep();
    std::vector<Lease> dead;  // dropped after the lock: a guard that goes may be the last owner of its segment
    const std::lock_guard lock(leases_mutex_);
    for (std::size_t i = 0; i < leases_.size();) {
        if (!leases_[i].holder.expired()) {
            ++i;
            continue;
        }
        dead.push_back(std::move(leases_[i]));
        leases_[i] = std::move(leases_.back());
        leases_.pop_back();
    }
    return had_works || !dead.empty();
}

}  // namespace torch_offload
