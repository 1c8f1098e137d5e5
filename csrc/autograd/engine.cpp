#include "autograd/engine.h"

#include <utility>

#include "autograd/forked_child.h"
#include "autograd/register_allocator.h"
#include "base/check.h"
#include "pager/tier_store.h"

namespace torch_offload {

std::shared_ptr<Engine> Engine::make(const EngineOptions& options) {
    watch_forks();
    OFFLOAD_CHECK(!in_forked_child(), OffloadError,
                  "an engine cannot be made in a forked child of a process that has one; start the child with the "
                  "spawn method");
    return std::shared_ptr<Engine>(new Engine(options));
}

namespace {

constexpr std::size_t kMostKept = 4;    // activations that the operator saving them still uses
constexpr std::size_t kKeptShare = 16;  // and at most one part in so many of the budget

PagerOptions with_device(PagerOptions options, Device& device) {
    options.device = &device;
    return options;
}

std::shared_ptr<Pager> make_compute_pager(const EngineOptions& options, Pager* host, Device* device) {
    if (!device) return std::make_shared<Pager>(options.pager);
    PagerOptions compute = with_device(options.pager, *device);
    compute.tier = Tier::device;
    compute.budget_bytes = options.device->budget_bytes;
    return std::make_shared<Pager>(compute, std::make_unique<TierStore>(*host, *device));
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      device_(options.device ? std::make_unique<EmulatedDevice>(options.device->emulated) : nullptr),
      host_(device_ ? std::make_unique<Pager>(with_device(options.pager, *device_)) : nullptr),
      pager_(make_compute_pager(options_, host_.get(), device_.get())),
      deferred_(std::make_unique<DeferredOps>(pager_)),
      mapped_copy_(std::make_unique<MappedCopy>(*this)) {
    pager_->set_pending_work(
        [this](Segment& segment, std::size_t index, bool may_wait) {
            // What a recorded kernel allocates must not wait for memory that only the record's end can free.
            const AllocatorBypass bypass;
            return deferred_->resolve(segment, index, may_wait);
        },
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
auto Engine::with_dead_leases_dropped(Attempt attempt) {
    try {
        return attempt();
    } catch (const OutOfTierMemory&) {
        const bool had_leases = sweep_leases();
        if (!drop_kept() && !had_leases) throw;
    }
    return attempt();
}

PinGuard Engine::pin(std::span<const PinRequest> requests) {
    return with_dead_leases_dropped([&] { return pager_->pin(requests); });
}

PinGuard Engine::pin_pages(const std::shared_ptr<Segment>& segment, std::size_t first, std::size_t count,
                           Access access) {
    return with_dead_leases_dropped([&] { return pager_->pin_pages(segment, first, count, access); });
}

std::span<std::byte> Engine::allocate_range(std::size_t size_bytes) {
    return with_dead_leases_dropped([&] { return pager_->allocate_range(size_bytes); });
}

void Engine::reserve_small(std::size_t size_bytes) {
    with_dead_leases_dropped([&] { pager_->reserve_small(size_bytes); });
}

void Engine::flush_pages() {
    pager_->flush();
    if (host_) host_->flush();
}

bool Engine::try_manage(const at::Tensor& tensor, SegmentRole role) {
    if (block_of(tensor)) {
        add_paged_key(tensor);
        return true;
    }
    if (!is_manageable(tensor) || tensor.nbytes() < options_.min_paged_bytes) return false;
    manage(shared_from_this(), tensor, std::move(role));
    return true;
}

// --- Activations --------------------------------------------------------------------------------------------------

void Engine::keep_for_a_while(const std::shared_ptr<Segment>& segment) {
    const PinRequest request{segment, Access::read};
    Kept kept{segment->size_bytes(), pager_->pin({&request, 1})};
    pager_->touch(segment);
    std::deque<Kept> ended;  // outlives the lock
    const std::lock_guard lock(kept_mutex_);
    kept_bytes_ += kept.size_bytes;
    kept_.push_back(std::move(kept));
    while (kept_.size() > kMostKept ||
           (kept_.size() > 1 && kept_bytes_ > pager_->options().budget_bytes / kKeptShare)) {
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

void Engine::begin_optimizer_step() {
    in_optimizer_step_.store(true, std::memory_order_relaxed);
    sweep_leases();
}

void Engine::end_optimizer_step() {
    in_optimizer_step_.store(false, std::memory_order_relaxed);
    steps_without_norms_.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard lock(roles_mutex_);
        ++step_;
    }
    sweep_leases();
    finish_loading();
    pager_->end_step();
    if (host_) host_->end_step();
}

TraceId Engine::derived_role(TraceId parameter_role, Derived derived) {
    const std::uint64_t key = (std::uint64_t{parameter_role} << 8) | static_cast<std::uint64_t>(derived);
    const std::lock_guard lock(roles_mutex_);
    DerivedRoles& roles = roles_[key];
    if (derived == Derived::gradient || roles.step != step_) {
        roles.used = 0;
        roles.step = step_;
    }
    if (roles.used == roles.ids.size()) roles.ids.push_back(pager_->new_trace_id());
    return roles.ids[roles.used++];
}

// --- Leases -------------------------------------------------------------------------------------------------------

void Engine::lease(const at::Tensor& view) {
    Block* block = block_of(view);
    if (!block) return;
    block->is_raw_exposed.store(true, std::memory_order_relaxed);
    const PinRequest request{block->segment, Access::read};
    Lease lease{c10::weak_intrusive_ptr<c10::TensorImpl>(view.getIntrusivePtr()), pin({&request, 1})};
    const std::lock_guard lock(leases_mutex_);
    leases_.push_back(std::move(lease));
}

bool Engine::sweep_leases() {
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
    return !dead.empty();
}

}  // namespace torch_offload
