// Where the program's time goes while it waits for the pager. Layer pager: includes base.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/counters.h"

namespace torch_offload {

/// Adds the time it lives to a total, less the time of other clocks that live inside it on the same thread: each
/// nanosecond of a thread is counted once, where it was spent. Threads of the engine are not counted at all.
class [[nodiscard]] StallClock {
public:
    explicit StallClock(Counter& total) noexcept;
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
    StallClock* outer_;
    Time since_;
};

}  // namespace torch_offload
