#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

// The fault handler uses these: their memory must be there already.
[[gnu::tls_model("initial-exec")]] thread_local StallClock* innermost = nullptr;
[[gnu::tls_model("initial-exec")]] thread_local bool is_ignored = false;

}  // namespace

StallClock::StallClock(Counter& total) noexcept
    : total_(total), outer_(innermost), since_(std::chrono::steady_clock::now()) {
    if (outer_) outer_->pause(since_);
    innermost = this;
}

StallClock::~StallClock() {
    const Time now = std::chrono::steady_clock::now();
    pause(now);
    innermost = outer_;
    if (outer_) outer_->since_ = now;
}

void StallClock::pause(Time now) noexcept {
    if (is_ignored) return;
    total_.add(static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now - since_).count()));
}

void StallClock::ignore_this_thread() noexcept { is_ignored = true; }

bool StallClock::is_thread_ignored() noexcept { return is_ignored; }

}  // namespace torch_offload
