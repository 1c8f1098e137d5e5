#include "pager/shared_budget.h"

#include <algorithm>

#include "base/log.h"
#include "pager/pager_guards.h"

namespace torch_offload {

std::size_t SharedBudget::lease(std::size_t size_bytes) noexcept {
    if (size_bytes == 0) return 0;
    const std::size_t leased_bytes = share_.lease(size_bytes);
    if (leased_bytes == 0) return 0;
    {
        const std::lock_guard lock(pager_.mutex);
        pager_.arena.raise_limit(leased_bytes);
    }
    pager_.announce_progress();
    return leased_bytes;
}

/// Lowers the arena's limit by whole quanta of what is free, at most `size_bytes`. Returns by how much.
std::size_t SharedBudget::lower_limit(std::size_t size_bytes) noexcept {
    const std::size_t quantum_bytes = share_.quantum_bytes();
    std::size_t lowered_bytes = 0;
    Pager::Impl::MemoryLock lock(pager_);
    try {
        while (lowered_bytes + quantum_bytes <= size_bytes && pager_.arena.lower_limit(quantum_bytes, lock)) {
            lowered_bytes += quantum_bytes;
        }
    } catch (const std::exception& error) {  // the rest is tried again in a moment
        OFFLOAD_LOG(info, "free memory was not given back to the system: ", error.what());
    }
    const bool is_registered = lowered_bytes < size_bytes && pager_.arena.usage().available_bytes() >= quantum_bytes;
    if (is_registered) pager_.unregister_wanted_bytes = size_bytes - lowered_bytes;
    return lowered_bytes;
}

/// Of what is free, at most `size_bytes`. Returns how much went.
std::size_t SharedBudget::give_back(std::size_t size_bytes) noexcept {
    const std::size_t given_bytes = lower_limit(size_bytes);
    share_.give_back(given_bytes);
    given_back_bytes_.add(given_bytes);
    if (given_bytes < size_bytes) pager_.store->kick();
    return given_bytes;
}

void SharedBudget::evict(std::size_t size_bytes) {
    std::size_t expected_bytes = pager_.evicting_bytes.load(std::memory_order_acquire);
    {
        const std::lock_guard lock(pager_.mutex);
        expected_bytes += pager_.arena.usage().available_bytes();
    }
    if (expected_bytes < size_bytes) pager_.evict_for(size_bytes - expected_bytes, 0);
}

/// Of small allocations that were counted without asking.
std::size_t SharedBudget::uncovered_bytes() {
    const std::lock_guard lock(pager_.mutex);
    const ArenaUsage usage = pager_.arena.usage();
    return usage.used_bytes() - std::min(usage.used_bytes(), usage.limit_bytes);
}

void SharedBudget::settle() noexcept try {
    lease(std::max(share_.wanted_bytes(), uncovered_bytes()));
    if (step_has_ended_.exchange(false) && share_.is_wanted_by_others()) {
        give_back(share_.held_bytes() - share_.guaranteed_bytes());
    }
    const std::size_t asked_bytes = share_.asked_bytes();
    if (asked_bytes == 0) return;
    const std::size_t given_bytes = give_back(asked_bytes);
    if (given_bytes < asked_bytes) evict(asked_bytes - given_bytes);
} catch (const std::exception& error) {  // tried again in a moment
    OFFLOAD_LOG(info, "memory that other processes want was not given back: ", error.what());
}

void SharedBudget::end_step() noexcept {
    share_.want_nothing();
    step_has_ended_.store(true);
}

ShareStatistics SharedBudget::statistics() const noexcept {
    return {.shared_bytes = share_.budget_bytes(),
            .equal_bytes = share_.equal_bytes(),
            .guaranteed_bytes = share_.guaranteed_bytes(),
            .leased_bytes = share_.held_bytes() - share_.guaranteed_bytes(),
            .most_leased_bytes = share_.most_held_bytes() - share_.guaranteed_bytes(),
            .given_back_bytes = given_back_bytes_.get()};
}

}  // namespace torch_offload
