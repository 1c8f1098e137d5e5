// A question to a thread that has what it is about to itself. Layer pager: includes nothing of another layer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace torch_offload {

/// Asks a thread for some lines, which it gives when it next looks whether somebody asks.
/// Threads: any may ask, one answers.
class Inquiry {
public:
    static constexpr std::chrono::milliseconds kPatience{1'000};

    /// `wake` has the thread look. nullopt: it has not answered within kPatience.
    std::optional<std::vector<std::string>> ask(std::size_t most, const std::function<void()>& wake);
    /// At most so many lines are asked for; 0: nobody asks.
    std::size_t wanted() const noexcept { return wanted_.load(std::memory_order_acquire); }
    /// Of everybody who has asked.
    void answer(std::vector<std::string> lines);

private:
    std::mutex mutex_;  // guards the rest but the last; a leaf
    std::condition_variable answered_;
    std::vector<std::string> lines_;
    std::uint64_t asked_count_ = 0;
    std::uint64_t answered_count_ = 0;
    std::atomic<std::size_t> wanted_{0};
};

}  // namespace torch_offload
