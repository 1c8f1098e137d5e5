// The thread on which a pager looks ahead. Layer pager.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "pager/pager.h"

namespace torch_offload {

/// Looks ahead whenever it was asked to since it began the last time, so that neither the program nor who moves pages
/// does.
/// Threads: wake and wake_if_due from any.
class PlannerThread {
public:
    explicit PlannerThread(Pager::Impl& pager) : pager_(pager) {}
    ~PlannerThread() { stop(); }
    PlannerThread(const PlannerThread&) = delete;
    PlannerThread& operator=(const PlannerThread&) = delete;

    void start();
    void stop();
    void wake() noexcept;
    /// The same at most once a millisecond.
    void wake_if_due() noexcept;

private:
    void run();

    Pager::Impl& pager_;
    std::atomic<std::uint32_t> wakes_{0};
    std::atomic<std::int64_t> last_due_ns_{0};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace torch_offload
