// What a pager takes of a budget that processes share, and gives back. Layer pager. Included by csrc/pager/*.cpp only.
#pragma once

#include <atomic>
#include <cstddef>

#include "base/budget_ledger.h"
#include "base/counters.h"
#include "pager/pager_impl.h"

namespace torch_offload {

/// The pager's arena hands out what the share holds, no more: its limit is raised after quanta have come, and quanta go
/// after it was lowered and the system has their memory.
/// Threads: any; no lock of the pager's may be held.
class SharedBudget {
public:
    SharedBudget(Pager::Impl& pager, BudgetShare& share) noexcept : pager_(pager), share_(share) {}

    /// Takes whole quanta for `size_bytes` more memory, as many as can be had at once. Returns how much came.
    std::size_t lease(std::size_t size_bytes) noexcept;
    /// Whether what this process wants will be given back by others.
    bool is_entitled() const noexcept { return share_.is_entitled(); }
    /// Takes what has become free of what was wanted, and gives back what others ask for: at once what is free, and
    /// the pages used last begin to leave for the rest. After the end of a step, all that is free goes to who wants it.
    /// By the service thread alone, now and then.
    void settle() noexcept;
    /// Nothing is wanted before the next step.
    void end_step() noexcept;
    ShareStatistics statistics() const noexcept;

private:
    std::size_t lower_limit(std::size_t size_bytes) noexcept;
    std::size_t give_back(std::size_t size_bytes) noexcept;
    void evict(std::size_t size_bytes);
    std::size_t uncovered_bytes();

    Pager::Impl& pager_;
    BudgetShare& share_;
    std::atomic<bool> step_has_ended_{false};
    Counter given_back_bytes_;
};

}  // namespace torch_offload
