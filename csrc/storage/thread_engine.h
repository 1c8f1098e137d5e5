// The engine that works everywhere: a few threads in preadv and pwritev. Layer storage: includes base only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "storage/io_engine.h"
#include "storage/wake_event.h"

namespace torch_offload {

/// Requests are served in the order of submission by up to kMaxThreads threads, which block all signals.
/// Destroying it waits for the transfers that have begun; those still queued are dropped. A forked child has
/// none of the threads and leaves its copy alone.
class ThreadEngine final : public IoEngine {
public:
    static constexpr std::size_t kMaxThreads = 8;

    explicit ThreadEngine(std::size_t capacity);
    ~ThreadEngine() override;

    std::size_t submit(std::span<IoRequest* const> requests) override;
    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override;
    void wake() noexcept override;
    BufferIndex register_buffer(std::span<std::byte>) override { return kUnregistered; }
    void unregister_buffer(BufferIndex) override {}
    bool quiesce() noexcept override;
    std::size_t capacity() const noexcept override { return capacity_; }
    std::string name() const override { return "threads"; }

private:
    void start_threads();
    void stop_threads() noexcept;
    void serve();
    std::size_t take_finished(std::span<IoRequest*> finished);

    const std::size_t capacity_;
    std::size_t in_flight_ = 0;  // taken and not yet given back; the owner's thread only
    WakeEvent event_;            // raised by wake() and when finished_ stops being empty
    std::atomic<bool> woken_{false};

    std::mutex mutex_;                // guards the three below
    std::vector<IoRequest*> queued_;  // has room for all that may be in flight, as the next
    std::vector<IoRequest*> finished_;
    bool stopping_ = false;
    std::condition_variable work_arrived_;
    std::vector<std::thread> threads_;
};

}  // namespace torch_offload
