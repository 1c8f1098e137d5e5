// An I/O engine that breaks as a whole after some calls. Header only.
#pragma once

#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "storage/io_engine.h"

namespace torch_offload::test {

/// Carries out transfers by another engine. From the call number `calls` of submit() and reap() on every one of them
/// throws TierIoError, submit() after it took what it was given.
/// Threads: as IoEngine.
class BreakingEngine final : public IoEngine {
public:
    BreakingEngine(std::unique_ptr<IoEngine> engine, int calls) : engine_(std::move(engine)), left_(calls) {}

    std::size_t submit(std::span<IoRequest* const> requests) override {
        const std::size_t taken = engine_->submit(requests);
        break_if_due("submit");
        return taken;
    }
    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override {
        break_if_due("reap");
        return engine_->reap(finished, timeout);
    }
    void wake() noexcept override { engine_->wake(); }
    BufferIndex register_buffer(std::span<std::byte> memory) override { return engine_->register_buffer(memory); }
    void unregister_buffer(BufferIndex index) override { engine_->unregister_buffer(index); }
    bool quiesce() noexcept override { return engine_->quiesce(); }
    std::size_t capacity() const noexcept override { return engine_->capacity(); }
    std::string name() const override { return "breaking"; }

    /// Whether it has broken; outlives the engine.
    std::shared_ptr<const std::atomic<bool>> is_broken() const { return is_broken_; }

private:
    void break_if_due(const char* call) {
        if (left_-- > 0) return;
        left_ = 0;
        is_broken_->store(true);
        throw TierIoError(concat("broken in ", call), EBADR);
    }

    std::unique_ptr<IoEngine> engine_;
    int left_;
    std::shared_ptr<std::atomic<bool>> is_broken_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace torch_offload::test
