#include "pager/use_log.h"

#include <utility>

namespace torch_offload {

void UseLog::switch_on() { is_on_.store(true, std::memory_order_relaxed); }

void UseLog::add(const UseEvent& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
}

std::vector<UseEvent> UseLog::take() {
    is_on_.store(false, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
}

}  // namespace torch_offload
