// An I/O engine made slower, to try a disk that is not there. Layer storage: includes base.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <unordered_map>
#include <vector>

#include "storage/io_engine.h"

namespace torch_offload {

/// Carries out transfers by another engine and gives them back as a disk of `bytes_per_second` would, which reads and
/// writes share: one after the other, in the order of their submission.
/// Threads: as IoEngine.
class ThrottledEngine final : public IoEngine {
public:
    /// Throws: InvalidArgument for a rate that is not above 0.
    ThrottledEngine(std::unique_ptr<IoEngine> engine, double bytes_per_second);

    std::size_t submit(std::span<IoRequest* const> requests) override;
    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override;
    void wake() noexcept override;
    BufferIndex register_buffer(std::span<std::byte> memory) override { return engine_->register_buffer(memory); }
    void unregister_buffer(BufferIndex index) override { engine_->unregister_buffer(index); }
    bool quiesce() noexcept override { return engine_->quiesce(); }
    std::size_t capacity() const noexcept override { return engine_->capacity(); }
    std::string name() const override { return engine_->name() + ", slowed down"; }

private:
    using Clock = std::chrono::steady_clock;

    std::size_t take_due(std::span<IoRequest*> finished, Clock::time_point now);
    Clock::time_point next_due() const;

    std::unique_ptr<IoEngine> engine_;
    double bytes_per_second_;
    Clock::time_point free_at_{};                             // when the disk will have done all that was submitted
    std::unordered_map<IoRequest*, Clock::time_point> ends_;  // of every request taken
    std::vector<IoRequest*> done_;                            // by the engine, and not due yet perhaps
    std::atomic<bool> is_woken_{false};
};

}  // namespace torch_offload
