// The pager's own thread: answers faults and applies deferred work. Layer pager.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/counters.h"
#include "pager/pager.h"

namespace torch_offload {

/// When the service thread applies deferred work.
enum class UpdateTime : std::uint8_t { at_once, while_program_waits };

/// Answers faults, applies deferred work ahead of need, and looks what other processes want of a budget that is shared,
/// on a thread that may wait and never takes the GIL.
/// Threads: push_fault is async-signal-safe; push_update from any.
class ServiceThread {
public:
    explicit ServiceThread(Pager::Impl& pager);
    ~ServiceThread();
    void start();
    void stop();
    void push_fault(Page& page) noexcept;
    void push_update(std::weak_ptr<Segment> segment, std::size_t index, UpdateTime time);
    /// The program waits: updates may run. Async-signal-safe.
    void wake() noexcept;
    bool is_stopping() const noexcept { return stopping_.load(std::memory_order_acquire); }
    /// A thread of the program begins to wait for other ranks, and ends.
    void begin_rank_wait() noexcept { rank_waiters_.fetch_add(1, std::memory_order_acq_rel); }
    void end_rank_wait() noexcept { rank_waiters_.fetch_sub(1, std::memory_order_acq_rel); }
    bool is_in_rank_wait() const noexcept { return rank_waiters_.load(std::memory_order_acquire) > 0; }
    /// Pages whose deferred work it applied meanwhile.
    std::uint64_t updates_in_rank_waits() const noexcept { return updates_in_rank_waits_.get(); }
    bool is_current() const noexcept { return std::this_thread::get_id() == thread_id_; }

private:
    void run();
    void wait_for_work() noexcept;
    bool may_update() const noexcept;
    void serve_faults();
    bool run_one_update(UpdateTime time);

    Pager::Impl& pager_;
    sem_t work_;
    std::atomic<Page*> faults_{nullptr};
    std::mutex updates_mutex_;
    using Update = std::pair<std::weak_ptr<Segment>, std::size_t>;
    std::deque<Update> updates_[2];  // by UpdateTime
    std::atomic<std::size_t> update_count_{0};
    std::atomic<int> rank_waiters_{0};
    Counter updates_in_rank_waits_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
    std::thread::id thread_id_;
};

}  // namespace torch_offload
