#include "autograd/collective_holds.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>

#include "autograd/engine.h"
#include "pager/rank_wait.h"

namespace torch_offload {

/// Members are destroyed from the last to the first: the guards go before the engine.
struct CollectiveHolds::Hold {
    std::shared_ptr<Engine> engine;
    Guards guards;
    bool is_collective;
    bool is_bucket;

    ~Hold() {
        guards.clear();
        if (is_collective) engine->collective_holds().note_end(is_bucket);
    }
};

namespace {

thread_local bool has_begun_collectives = false;

c10::intrusive_ptr<c10d::Work> work_among(c10::ArrayRef<c10::IValue> results) {
    for (const c10::IValue& result : results) {
        if (result.isCustomClass()) return result.toCustomClass<c10d::Work>();
    }
    return nullptr;
}

/// Nothing where the work has none: torch says so by an error only.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
    try {
        return work.getFuture();
    } catch (const c10::Error&) {
        return nullptr;
    }
}

}  // namespace

void CollectiveHolds::hold(const std::shared_ptr<Engine>& engine, c10::ArrayRef<c10::IValue> results, Guards guards,
                           bool is_bucket) {
    const c10::intrusive_ptr<c10d::Work> work = work_among(results);
    if (!work) return;
    const c10::intrusive_ptr<c10::ivalue::Future> future = future_of(*work);
    std::unique_lock lock(mutex_);
    if (!future) {
        kept_.push_back({c10::weak_intrusive_ptr<torch::CustomClassHolder>(work), std::move(guards)});
        return;
    }
    const bool is_collective = !c10d::isP2POp(work->retrieveOpType());
    if (is_collective) {
        has_begun_collectives = true;
        ++under_way_;
        buckets_under_way_ += is_bucket ? 1 : 0;
    }
    lock.unlock();
    auto held = std::make_shared<Hold>(engine, std::move(guards), is_collective, is_bucket);
    if (is_collective && is_bucket) wait_at_end_of_backward(engine);
    future->addCallback([held = std::move(held)](c10::ivalue::Future&) mutable { held.reset(); });
}

bool CollectiveHolds::sweep() {
    std::vector<Kept> gone;  // outlives the lock: a guard that goes may be the last owner of its segment
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](Kept& kept) {
        if (!kept.work.expired()) return false;
        gone.push_back(std::move(kept));
        return true;
    });
    return !gone.empty();
}

bool CollectiveHolds::wait_for_one() {
    std::unique_lock lock(mutex_);
    if (under_way_ == 0 || !has_begun_collectives) return false;
    ended_.wait(lock, [this, before = ends_] { return ends_ != before; });
    return true;
}

/// `DistributedDataParallel` waits in C++ where nobody sees it, in a callback that it queues for the end of the pass
/// once it has begun to reduce all buckets. This one is queued before it, and waits for the same.
void CollectiveHolds::wait_at_end_of_backward(const std::shared_ptr<Engine>& engine) {
    const int task = torch::autograd::get_current_graph_task_id();
    if (task == -1) return;  // it is reduced after the pass
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(waiting_task_, task) == task) return;
    }
    torch::autograd::Engine::get_default_engine().queue_callback([of = std::weak_ptr(engine)] {
        if (const std::shared_ptr<Engine> there = of.lock()) there->collective_holds().wait_for_buckets(there->pager());
    });
}

void CollectiveHolds::wait_for_buckets(Pager& pager) {
    const RankWait waiting(pager);
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return buckets_under_way_ == 0; });
}

void CollectiveHolds::note_end(bool is_bucket) noexcept {
    {
        const std::lock_guard lock(mutex_);
        --under_way_;
        ++ends_;
        buckets_under_way_ -= is_bucket ? 1 : 0;
    }
    ended_.notify_all();
}

}  // namespace torch_offload
