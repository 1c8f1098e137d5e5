// A clock that a test moves. Needs fake_clock.cpp.
#pragma once

#include <chrono>

namespace torch_offload::test {

/// While it lives, std::chrono::steady_clock stands still in the whole program and goes on only by advance(). Waits
/// with a timeout still end after real time: code under test waits for events, or in an engine that advances the clock.
/// Threads: advance() from any; one clock at a time.
class FakeClock {
public:
    FakeClock();
    ~FakeClock();
    FakeClock(const FakeClock&) = delete;
    FakeClock& operator=(const FakeClock&) = delete;

    void advance(std::chrono::nanoseconds time);
};

}  // namespace torch_offload::test
