#include "pager/inquiry.h"

#include <algorithm>
#include <utility>

namespace torch_offload {

std::optional<std::vector<std::string>> Inquiry::ask(std::size_t most, const std::function<void()>& wake) {
    std::uint64_t own = 0;
    {
        const std::lock_guard lock(mutex_);
        own = ++asked_count_;
        wanted_.store(std::max(most, wanted_.load(std::memory_order_relaxed)), std::memory_order_release);
    }
    wake();
    std::unique_lock lock(mutex_);
    if (!answered_.wait_for(lock, kPatience, [&] { return answered_count_ >= own; })) return std::nullopt;
    return lines_;
}

void Inquiry::answer(std::vector<std::string> lines) {
    {
        const std::lock_guard lock(mutex_);
        lines_ = std::move(lines);
        answered_count_ = asked_count_;
        wanted_.store(0, std::memory_order_release);
    }
    answered_.notify_all();
}

}  // namespace torch_offload
