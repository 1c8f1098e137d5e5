// How threads of the engine begin. Layer base.
#pragma once

#include <cxxabi.h>
#include <pthread.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"

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

/// Between a new thread and the one that started it, which waits until the new one is known to have memory.
class ThreadBeginning {
public:
    /// Called first by the new thread; returns whether it goes on. Memory of a thread that is made when it is used for
    /// the first time, such as what errors are thrown with, ends the process where there is none: it is used now.
    bool has_memory() noexcept {
        void* const volatile probe = std::malloc(1);  // the C library makes a heap for this thread, if there is room
        const void* const volatile errors = probe == nullptr ? nullptr : abi::__cxa_get_globals();
        std::free(probe);
        state_.store(errors == nullptr ? State::without_memory : State::good, std::memory_order_release);
        state_.notify_one();
        return errors != nullptr;
    }

    /// What the other one learnt.
    bool wait() const noexcept {
        state_.wait(State::unknown, std::memory_order_acquire);
        return state_.load(std::memory_order_acquire) == State::good;
    }

private:
    enum class State : std::uint8_t { unknown, good, without_memory };

    std::atomic<State> state_{State::unknown};
};

/// Starts a thread that debuggers show as `name` (at most 15 characters) and that takes no signals of the program's.
/// Throws: OffloadError if the system has no thread left, or no memory for one.
template <typename Body>
std::thread engine_thread(const char* name, Body body) {
    const SignalsBlocked blocked;
    const auto beginning = std::make_shared<ThreadBeginning>();
    const char* const remedy = "; raise the limit on processes (ulimit -u), or free memory";
    try {
        std::thread thread([name, beginning, body = std::move(body)]() mutable {
            pthread_setname_np(pthread_self(), name);
            if (beginning->has_memory()) body();
        });
        if (beginning->wait()) return thread;
        thread.join();
    } catch (const std::system_error& error) {
        throw OffloadError(concat("cannot start the thread ", name, ": ", error.what(), remedy));
    }
    throw OffloadError(concat("cannot start the thread ", name, ": there is no memory for it", remedy));
}

}  // namespace torch_offload
