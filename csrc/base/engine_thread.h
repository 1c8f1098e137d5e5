// How threads of the engine begin. Layer base: includes nothing of this project.
#pragma once

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <thread>
#include <utility>

namespace torch_offload {

/// Blocks every signal while it lives but those that a thread brings upon itself, so that threads made meanwhile
/// inherit that: handlers of the program run where the program expects them.
class SignalsBlocked {
public:
    SignalsBlocked() noexcept {
        sigset_t blocked;
        sigfillset(&blocked);
        for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&blocked, own);
        pthread_sigmask(SIG_SETMASK, &blocked, &previous_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t previous_;
};

/// Has the scheduler let this thread run soon after it wakes, for as short as it needs: other threads of the program
/// compute on all cores. Since Linux 6.12; before, this changes nothing.
inline void ask_for_short_slices() noexcept {
    struct {
        std::uint32_t size = 48;
        std::uint32_t policy = 0;
        std::uint64_t flags = 0;
        std::int32_t nice = getpriority(PRIO_PROCESS, 0);
        std::uint32_t priority = 0;
        std::uint64_t runtime = 100'000;
        std::uint64_t deadline = 0;
        std::uint64_t period = 0;
    } attributes;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

/// Starts a thread that debuggers show as `name` (at most 15 characters) and that takes no signals of the program's.
/// Throws: std::system_error if the system has no thread left.
template <typename Body>
std::thread engine_thread(const char* name, Body body) {
    const SignalsBlocked blocked;
    return std::thread([name, body = std::move(body)]() mutable {
        pthread_setname_np(pthread_self(), name);
        ask_for_short_slices();
        body();
    });
}

}  // namespace torch_offload
