// What the engine's resources did when, for a trace that a person looks at. Layer base: includes nothing of this
// project.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace torch_offload {

/// A resource that is busy, or what a thread of the program waits for.
enum class ActivityLane : std::uint8_t {
    ssd_read,
    ssd_write,
    to_device,
    to_host,
    update,          // deferred work, whoever applies it
    optimizer_step,  // of the program
    stall_read,
    stall_memory,
    stall_update,
    stall_fault,
    stall_network,
};
inline constexpr std::size_t kActivityLaneCount = 11;

/// Nanoseconds on the clock of every activity, which is that of `CLOCK_MONOTONIC`. Async-signal-safe.
inline std::int64_t activity_now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

/// One thing that was done from one moment to another.
struct Activity {
    static constexpr std::size_t kLabelBytes = 48;

    Activity() noexcept = default;
    /// Of a longer label the end is kept: names of parameters differ there.
    Activity(ActivityLane a_lane, std::int64_t a_begin_ns, std::int64_t an_end_ns, std::uint64_t a_size_bytes = 0,
             std::string_view a_label = {}) noexcept;
    std::string_view label() const noexcept { return {label_text.data(), label_bytes}; }

    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::uint64_t size_bytes = 0;  // 0 where none were moved or changed
    std::uint32_t thread_id = 0;   // of the system; of who says it
    ActivityLane lane = ActivityLane::ssd_read;
    std::uint8_t label_bytes = 0;
    std::array<char, kLabelBytes> label_text{};
};

/// What a log holds at one moment.
struct ActivityRecord {
    std::int64_t begin_ns = 0;  // when recording started
    std::int64_t end_ns = 0;    // of the record
    std::uint64_t dropped_count = 0;
    std::vector<Activity> activities;  // in the order in which they ended, roughly
};

/// Records activities from start() on, as many as it was given room for: those that come later are counted only, so
/// that a full log is complete up to a moment, on every lane. Off, it holds no memory.
/// Threads: any. add() is lock-free and async-signal-safe; off, it is one relaxed load.
class ActivityLog {
public:
    ActivityLog() noexcept = default;
    ActivityLog(const ActivityLog&) = delete;
    ActivityLog& operator=(const ActivityLog&) = delete;

    /// Throws: InvalidArgument for a capacity of 0; LogicError if it was started before.
    void start(std::size_t capacity);
    bool is_on() const noexcept { return slots_.load(std::memory_order_relaxed) != nullptr; }
    void add(const Activity& activity) noexcept {
        if (is_on()) put(activity);
    }
    /// Goes on recording. Who is in the middle of add() is left out.
    ActivityRecord copy() const;

private:
    struct Slot {
        Activity activity;
        std::atomic<bool> is_written{false};
    };
    void put(const Activity& activity) noexcept;

    std::mutex start_mutex_;
    std::unique_ptr<Slot[]> memory_;
    std::size_t capacity_ = 0;  // constant, like the next, once slots_ is set
    std::int64_t begin_ns_ = 0;
    std::atomic<Slot*> slots_{nullptr};
    std::atomic<std::uint64_t> added_count_{0};
};

}  // namespace torch_offload
