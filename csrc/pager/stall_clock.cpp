#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

// The fault handler uses these: their memory must be there already.
[[gnu::tls_model("initial-exec")]] thread_local StallClock* innermost = nullptr;
[[gnu::tls_model("initial-exec")]] thread_local bool is_ignored = false;

std::int64_t nanoseconds(std::chrono::steady_clock::time_point time) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

StallClock::StallClock(Counter& total, ActivityLog* log, ActivityLane lane) noexcept
    : total_(total), log_(log), lane_(lane), outer_(innermost), since_(std::chrono::steady_clock::now()) {
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
    const std::int64_t begin_ns = nanoseconds(since_);
    const std::int64_t end_ns = nanoseconds(now);
    total_.add(static_cast<std::uint64_t>(end_ns - begin_ns));
    if (log_ && log_->is_on()) log_->add({lane_, begin_ns, end_ns});
}

void StallClock::ignore_this_thread() noexcept { is_ignored = true; }

bool StallClock::is_thread_ignored() noexcept { return is_ignored; }

}  // namespace torch_offload
