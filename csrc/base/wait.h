// Waits that end: for a word to change, at most for so long, and interruptible by who wants the program to end.
// Layer base: includes nothing of another layer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace torch_offload {

/// Sleeps while `word` is `seen`. Returns false if it still is after `limit`. Whoever changes the word calls wake_all()
/// after that. Async-signal-safe. (std::atomic::wait has no limit.)
bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     std::chrono::nanoseconds limit) noexcept;
/// The same without a limit.
void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen) noexcept;
/// Async-signal-safe; a system call only where somebody sleeps.
void wake_all(const std::atomic<std::uint32_t>& word) noexcept;

/// Called by a thread that has waited for long and holds no lock; throws what is to end the wait, such as what the
/// handler of a signal raised.
using InterruptCheck = void (*)();
void set_interrupt_check(InterruptCheck check) noexcept;

/// A wait in slices, so that it can be interrupted: it sleeps for kSlice at most, then calls check(), and so on.
class InterruptibleWait {
public:
    static constexpr std::chrono::milliseconds kSlice{1'000};
    /// Shorter waits are not interrupted: what is waited for will come.
    static constexpr std::chrono::milliseconds kFirstCheck{5'000};

    /// Throws: OffloadError on a thread that is in such a check: what it waits for may wait for the thread itself.
    InterruptibleWait();
    /// Throws: what the InterruptCheck throws.
    void check() const;

private:
    std::chrono::steady_clock::time_point since_;
};

/// Sleeps while `word` is `seen`. Throws: what InterruptibleWait does.
void wait_interruptibly(const std::atomic<std::uint32_t>& word, std::uint32_t seen);

}  // namespace torch_offload
