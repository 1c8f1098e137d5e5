#include "base/wait.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"

namespace torch_offload {
namespace {

using std::chrono::milliseconds;

struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// An interrupt check for as long as it lives.
class Checked {
public:
    explicit Checked(InterruptCheck check) { set_interrupt_check(check); }
    ~Checked() { set_interrupt_check(nullptr); }
    Checked(const Checked&) = delete;
    Checked& operator=(const Checked&) = delete;
};

// A word that nobody changes ends the wait at its limit; one that has changed already ends it at once.
TEST(Wait, EndsAtItsLimit) {
    std::atomic<std::uint32_t> word{1};
    EXPECT_FALSE(wait_for_change(word, 1, milliseconds(5)));
    EXPECT_TRUE(wait_for_change(word, 0, std::chrono::hours(1)));
}

// Every change wakes everybody who sleeps on the word: none is lost between looking and sleeping. Method: threads that
// pass a word on in turns, so that one lost wake-up would hang all of them.
TEST(Wait, LosesNoWakeUp) {
    constexpr std::uint32_t kThreads = 4;
    constexpr std::uint32_t kTurns = 20'000;
    std::atomic<std::uint32_t> word{0};
    std::vector<std::thread> threads;
    for (std::uint32_t own = 0; own < kThreads; ++own) {
        threads.emplace_back([&, own] {
            while (true) {
                const std::uint32_t seen = word.load();
                if (seen >= kTurns) return;
                if (seen % kThreads != own) {
                    wait_for_change(word, seen);
                    continue;
                }
                word.fetch_add(1);
                wake_all(word);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(word.load(), kTurns);
}

// What the check throws ends a wait that has become long, and a check that returns does not.
TEST(Wait, LongOneIsInterrupted) {
    static std::atomic<int> checks;
    checks = 0;
    const Checked checked([] {
        if (++checks == 2) throw Interrupted("enough");
    });
    const std::atomic<std::uint32_t> word{1};
    const auto since = std::chrono::steady_clock::now();
    EXPECT_THROW(wait_interruptibly(word, 1), Interrupted);
    EXPECT_EQ(checks, 2);
    EXPECT_GE(std::chrono::steady_clock::now() - since, InterruptibleWait::kFirstCheck);
}

// A check that waits itself, as the handler of a signal that saves a model would, is told so rather than waits for the
// thread that it runs on; afterwards the thread may wait again.
TEST(Wait, CheckCannotWait) {
    static const std::atomic<std::uint32_t> word{1};
    const Checked checked([] { wait_interruptibly(word, 1); });
    EXPECT_THROW(wait_interruptibly(word, 1), OffloadError);
    EXPECT_NO_THROW(wait_interruptibly(word, 0));
}

}  // namespace
}  // namespace torch_offload
