// How long single reads from the tier below take. Layer pager: standard library only.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace torch_offload {

/// Reads by how long they took, in bins whose bounds grow by an eighth of a power of two: counts, so that windows of
/// time are differences, and the few slow reads that a group of ranks waits for are as exact as the many quick ones.
/// Threads: any; a note is one relaxed increment.
/// Source:  bins of a power of two divided evenly after Tene, HdrHistogram.
class ReadTimes {
public:
    static constexpr std::size_t kBinsOfOctave = 8;
    static constexpr int kFirstOctave = 10;  // 1 us: the first bin has all that is shorter
    static constexpr int kEndOctave = 38;    // 275 s, beyond any limit: the last bin has all that is longer
    static constexpr std::size_t kBinCount = std::size_t{kEndOctave - kFirstOctave} * kBinsOfOctave + 1;
    using Counts = std::array<std::uint64_t, kBinCount>;

    void note(std::chrono::nanoseconds elapsed) noexcept {
        counts_[bin_of(elapsed.count())].fetch_add(1, std::memory_order_relaxed);
    }

    Counts counts() const noexcept {
        Counts result{};
        for (std::size_t bin = 0; bin < kBinCount; ++bin) result[bin] = counts_[bin].load(std::memory_order_relaxed);
        return result;
    }

    static constexpr std::size_t bin_of(std::int64_t elapsed_ns) noexcept {
        if (elapsed_ns < std::int64_t{1} << kFirstOctave) return 0;
        const int octave = std::bit_width(static_cast<std::uint64_t>(elapsed_ns)) - 1;
        if (octave >= kEndOctave) return kBinCount - 1;
        const auto past = static_cast<std::size_t>(elapsed_ns - (std::int64_t{1} << octave));
        const std::size_t part = past * kBinsOfOctave >> octave;
        return 1 + static_cast<std::size_t>(octave - kFirstOctave) * kBinsOfOctave + part;
    }

    /// Below it lies what is in the bins before; the end of a bin is the begin of the next.
    static constexpr std::int64_t begin_ns(std::size_t bin) noexcept {
        if (bin == 0) return 0;
        const auto octave = kFirstOctave + static_cast<int>((bin - 1) / kBinsOfOctave);
        const auto part = static_cast<std::int64_t>((bin - 1) % kBinsOfOctave + kBinsOfOctave);
        return (part << octave) / static_cast<std::int64_t>(kBinsOfOctave);
    }

private:
    std::array<std::atomic<std::uint64_t>, kBinCount> counts_{};
};

}  // namespace torch_offload
