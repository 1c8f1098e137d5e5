#include "base/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <thread>

#include "base/check.h"

namespace torch_offload {
namespace {

constexpr int kSpins = 16;
constexpr int kYields = 4;

/// How many threads sleep on words, by a hash of the word's address: who wakes saves the system call where nobody does.
struct alignas(64) Sleepers {
    std::atomic<std::uint32_t> count{0};
};
constinit std::array<Sleepers, 64> sleepers;

Sleepers& sleepers_on(const std::atomic<std::uint32_t>& word) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(&word);
    return sleepers[(address >> 3 ^ address >> 12) % sleepers.size()];
}

long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* limit) noexcept {
    static_assert(sizeof word == sizeof value && std::atomic<std::uint32_t>::is_always_lock_free);
    return ::syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

std::atomic<InterruptCheck> interrupt_check{nullptr};
thread_local bool is_checking = false;

}  // namespace

bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     std::chrono::nanoseconds limit) noexcept {
    const auto has_changed = [&] { return word.load(std::memory_order_acquire) != seen; };
    for (int i = 0; i < kSpins + kYields; ++i) {
        if (has_changed()) return true;
        if (i >= kSpins) std::this_thread::yield();
    }
    const auto deadline = std::chrono::steady_clock::now() + limit;
    std::atomic<std::uint32_t>& count = sleepers_on(word).count;
    count.fetch_add(1, std::memory_order_acq_rel);  // before the kernel compares the word
    while (!has_changed()) {
        const std::chrono::nanoseconds left = deadline - std::chrono::steady_clock::now();
        if (left.count() <= 0) break;
        const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
        const timespec time{seconds.count(), (left - seconds).count()};
        futex(word, FUTEX_WAIT_PRIVATE, seen, &time);  // EAGAIN, EINTR, ETIMEDOUT: the word and the clock tell
    }
    count.fetch_sub(1, std::memory_order_relaxed);
    return has_changed();
}

void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen) noexcept {
    while (!wait_for_change(word, seen, std::chrono::hours(1))) {
    }
}

/// Reads the count by changing it: either the sleeper was counted before and is woken, or it sees the change of the
/// word.
void wake_all(const std::atomic<std::uint32_t>& word) noexcept {
    if (sleepers_on(word).count.fetch_add(0, std::memory_order_acq_rel) == 0) return;
    futex(word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr);
}

void set_interrupt_check(InterruptCheck check) noexcept { interrupt_check.store(check, std::memory_order_release); }

InterruptibleWait::InterruptibleWait() : since_(std::chrono::steady_clock::now()) {
    OFFLOAD_CHECK(!is_checking, OffloadError,
                  "the handler of a signal has to wait for a managed tensor while the operation that it interrupted "
                  "waits for the disk; end the program from the handler, or only note the signal there");
}

void InterruptibleWait::check() const {
    const InterruptCheck check = interrupt_check.load(std::memory_order_acquire);
    if (!check || std::chrono::steady_clock::now() - since_ < kFirstCheck) return;
    struct Checking {
        Checking() noexcept { is_checking = true; }
        ~Checking() { is_checking = false; }
    };
    const Checking checking;
    check();
}

void wait_interruptibly(const std::atomic<std::uint32_t>& word, std::uint32_t seen) {
    const InterruptibleWait wait;
    while (!wait_for_change(word, seen, InterruptibleWait::kSlice)) wait.check();
}

}  // namespace torch_offload
