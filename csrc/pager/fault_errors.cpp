#include "pager/fault_errors.h"

#include <utility>

namespace torch_offload {

FaultErrors::~FaultErrors() {
    if (error_ && notice_.left) notice_.left(std::move(error_));
}

/// The error that was kept before goes after the lock: one that Python raised takes the GIL for that.
void FaultErrors::keep(std::exception_ptr error) noexcept {
    const std::lock_guard lock(mutex_);
    error_.swap(error);
    is_waiting_.store(true, std::memory_order_release);
}

void FaultErrors::tell() const noexcept {
    if (notice_.kept) notice_.kept();
}

void FaultErrors::marked() noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (is_waiting_.exchange(true, std::memory_order_acq_rel)) return;
    }
    tell();
}

std::exception_ptr FaultErrors::take() noexcept {
    const std::lock_guard lock(mutex_);
    is_waiting_.store(false, std::memory_order_release);
    return std::exchange(error_, nullptr);
}

}  // namespace torch_offload
