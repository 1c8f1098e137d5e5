#include "pager/planner_thread.h"

#include "base/engine_thread.h"
#include "pager/pager_impl.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

constexpr std::int64_t kDueEveryNs = 1'000'000;

}  // namespace

void PlannerThread::start() {
    thread_ = engine_thread("to-plan", [this] { run(); });
}

void PlannerThread::stop() {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_release);
    wake();
    thread_.join();
}

void PlannerThread::wake() noexcept {
    wakes_.fetch_add(1, std::memory_order_acq_rel);
    wakes_.notify_one();
}

void PlannerThread::wake_if_due() noexcept {
    const std::int64_t now_ns = steady_ns();
    std::int64_t last_ns = last_due_ns_.load(std::memory_order_relaxed);
    if (now_ns - last_ns < kDueEveryNs) return;
    if (last_due_ns_.compare_exchange_strong(last_ns, now_ns, std::memory_order_relaxed)) wake();
}

void PlannerThread::run() {
    StallClock::ignore_this_thread();
    std::uint32_t seen = 0;
    while (true) {
        wakes_.wait(seen, std::memory_order_acquire);
        seen = wakes_.load(std::memory_order_acquire);
        if (stopping_.load(std::memory_order_acquire)) return;
        pager_.look_ahead();
    }
}

}  // namespace torch_offload
