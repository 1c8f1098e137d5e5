// Where the program's time goes while it waits for the pager, or for other processes. Layer pager: includes base.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/activity_log.h"
#include "base/counters.h"

namespace torch_offload {

/// What a thread of the program waited for: a read; free memory, which writes make; deferred work that another
/// thread applies; an access behind the dispatcher; other processes, in a collective. Each nanosecond counts once.
enum class StallCause : std::uint8_t { read, memory, update, fault, network };
inline constexpr std::size_t kStallCauseCount = 5;

struct StallTotals {
    Counter ns[kStallCauseCount];  // by StallCause

    std::uint64_t sum_ns() const noexcept {
        std::uint64_t sum = 0;
        for (const Counter& cause : ns) sum += cause.get();
        return sum;
    }
};

/// Adds the time it lives to a total, less the time of other clocks that live inside it on the same thread: each
/// nanosecond of a thread is counted once, where it was spent. What it adds it also says to a log, if it has one.
/// Threads of the engine are not counted at all.
class [[nodiscard]] StallClock {
public:
    explicit StallClock(Counter& total) noexcept : StallClock(total, nullptr, ActivityLane::stall_update) {}
    StallClock(Counter& total, ActivityLog* log, ActivityLane lane) noexcept;
    ~StallClock();
    StallClock(const StallClock&) = delete;
    StallClock& operator=(const StallClock&) = delete;

    /// From now on the calling thread is one of the engine's.
    static void ignore_this_thread() noexcept;
    static bool is_thread_ignored() noexcept;

private:
    using Time = std::chrono::steady_clock::time_point;
    void pause(Time now) noexcept;

    Counter& total_;
    ActivityLog* log_;
    ActivityLane lane_;
    StallClock* outer_;
    Time since_;
};

}  // namespace torch_offload
