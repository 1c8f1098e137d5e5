#include "pager/use_log.h"

#include <new>
#include <utility>

#include "base/log.h"

namespace torch_offload {

void UseLog::switch_on() { is_on_.store(true, std::memory_order_relaxed); }

void UseLog::add(const UseEvent& event) noexcept try {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
} catch (const std::bad_alloc&) {
    OFFLOAD_LOG(error, "the log of uses has no memory for more: what is made of it is wrong");
}

std::vector<UseEvent> UseLog::take() {
    is_on_.store(false, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
}

}  // namespace torch_offload
