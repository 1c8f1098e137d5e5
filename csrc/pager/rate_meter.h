// How fast pages come from the tier below. Layer pager: standard library only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>

namespace torch_offload {

/// Bytes per second of reads, a running mean over measurements. Each spans many bytes or, on a slow link, enough time;
/// the first one replaces the guess.
/// Threads: note() from one, rate() from any.
class RateMeter {
public:
    explicit RateMeter(double guess) noexcept : rate_(guess) {}

    double rate() const noexcept { return rate_.load(std::memory_order_relaxed); }

    /// Bytes that came, in time in which reads were under way.
    void note(std::size_t size_bytes, std::chrono::nanoseconds elapsed) noexcept {
        size_bytes_ += size_bytes;
        elapsed_ += elapsed;
        const bool is_enough = size_bytes_ >= kEnoughBytes || (size_bytes_ > 0 && elapsed_ >= kEnoughTime);
        if (!is_enough || elapsed_.count() <= 0) return;
        const double measured = static_cast<double>(size_bytes_) / std::chrono::duration<double>(elapsed_).count();
        const double weight = has_measured_ ? kWeightOfLast : 1;
        rate_.store(weight * measured + (1 - weight) * rate(), std::memory_order_relaxed);
        has_measured_ = true;
        size_bytes_ = 0;
        elapsed_ = {};
    }

private:
    static constexpr std::size_t kEnoughBytes = std::size_t{64} << 20;
    static constexpr std::chrono::nanoseconds kEnoughTime = std::chrono::milliseconds(250);
    static constexpr double kWeightOfLast = 0.5;

    std::atomic<double> rate_;
    std::size_t size_bytes_ = 0;  // of the measurement under way, like the next
    std::chrono::nanoseconds elapsed_{0};
    bool has_measured_ = false;
};

}  // namespace torch_offload
