// An I/O engine that goes on with another one when it breaks. Layer storage: includes base.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <unordered_set>

#include "base/check.h"
#include "storage/io_engine.h"

namespace torch_offload {

/// Carries out transfers by a first engine until that fails as a whole (its submit() or reap() throws TierIoError),
/// from then on by a second one. What was in flight is waited for and made again: transfers may be repeated without
/// harm. A second engine that fails as well throws to the caller. Threads: as IoEngine.
class FallbackEngine final : public IoEngine {
public:
    /// Makes an engine of the capacity given. The default makes a ThreadEngine.
    using MakeEngine = std::function<std::unique_ptr<IoEngine>(std::size_t capacity)>;

    explicit FallbackEngine(std::unique_ptr<IoEngine> first, MakeEngine make_second = {});

    std::size_t submit(std::span<IoRequest* const> requests) override;
    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override;
    void wake() noexcept override { current_.load(std::memory_order_acquire)->wake(); }
    BufferIndex register_buffer(std::span<std::byte> memory) override;
    void unregister_buffer(BufferIndex index) override;
    bool quiesce() noexcept override { return current_.load(std::memory_order_acquire)->quiesce(); }
    std::size_t capacity() const noexcept override { return first_->capacity(); }
    std::string name() const override { return current_.load(std::memory_order_acquire)->name(); }

private:
    void fall_back(const TierIoError& error);

    std::unique_ptr<IoEngine> first_;
    MakeEngine make_second_;
    std::unique_ptr<IoEngine> second_;
    std::atomic<IoEngine*> current_;
    std::unordered_set<IoRequest*> in_flight_;
};

}  // namespace torch_offload
