#include "support/fake_clock.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;

std::atomic<std::int64_t> fake_ns{0};  // 0: the real time

}  // namespace

// Stands before the C library's function, which steady_clock calls.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
    using Call = int (*)(clockid_t, timespec*);
    static const auto real_call = reinterpret_cast<Call>(::dlsym(RTLD_NEXT, "clock_gettime"));
    const std::int64_t now_ns = clock == CLOCK_MONOTONIC ? fake_ns.load() : 0;
    if (now_ns == 0) return real_call(clock, time);
    *time = {.tv_sec = now_ns / kSecondNs, .tv_nsec = now_ns % kSecondNs};
    return 0;
}

namespace torch_offload::test {

FakeClock::FakeClock() { fake_ns = std::chrono::steady_clock::now().time_since_epoch().count(); }

FakeClock::~FakeClock() { fake_ns = 0; }

void FakeClock::advance(std::chrono::nanoseconds time) { fake_ns += time.count(); }

}  // namespace torch_offload::test
