#include "device/cuda_event.h"

#include <utility>

#include "base/log.h"

namespace torch_offload {

/// On a lost device everything has passed: nothing runs any more, and wait() says so.
class CudaEvent final : public Event {
public:
    CudaEvent(std::shared_ptr<CudaEventPool> pool, CuEvent event, CuStream stream)
        : pool_(std::move(pool)), event_(event), stream_(stream) {}
    ~CudaEvent() override { pool_->give_back(event_); }
    CudaEvent(const CudaEvent&) = delete;
    CudaEvent& operator=(const CudaEvent&) = delete;

    bool has_passed() const noexcept override {
        const CudaContext& context = pool_->context_;
        try {
            const CudaContext::Scope scope(context);
            const CuResult result = context.functions().cuEventQuery(event_);
            if (result == CuResult::not_ready || is_of_capture(result)) return false;
            context.check(result, "cuEventQuery");
            return true;
        } catch (const std::exception& error) {
            OFFLOAD_LOG(debug, "an event cannot be asked: ", error.what());
        }
        return context.is_lost();
    }

    const void* queue() const noexcept override { return stream_; }

    void wait() const override {
        const CudaContext& context = pool_->context_;
        const CudaContext::Scope scope(context);
        OFFLOAD_CUDA(context, cuEventSynchronize, event_);
    }

    /// A stream is in order with itself.
    void hold_back(CuStream stream) const {
        if (stream == stream_) return;
        const CudaContext& context = pool_->context_;
        const CudaContext::Scope scope(context);
        OFFLOAD_CUDA(context, cuStreamWaitEvent, stream, event_, 0);
    }

private:
    std::shared_ptr<CudaEventPool> pool_;
    CuEvent event_;
    CuStream stream_;  // in which it was recorded
};

/// An event that is recorded in a captured stream would be the graph's: asking about it breaks the capture, and it
/// never passes. So it is recorded afterwards.
class LateCudaEvent final : public Event {
public:
    LateCudaEvent(std::shared_ptr<CudaEventPool> pool, CuStream stream) : pool_(std::move(pool)), stream_(stream) {}

    bool has_passed() const noexcept override {
        try {
            return recorded()->has_passed();
        } catch (const std::exception& error) {
            OFFLOAD_LOG(debug, "an event is not recorded yet: ", error.what());
        }
        return pool_->context_.is_lost();
    }

    const void* queue() const noexcept override { return stream_; }
    void wait() const override { recorded()->wait(); }

private:
    /// The first that was.
    std::shared_ptr<const Event> recorded() const {
        {
            const std::lock_guard lock(mutex_);
            if (event_) return event_;
        }
        std::shared_ptr<const Event> made = pool_->record(stream_);
        const std::lock_guard lock(mutex_);
        if (!event_) event_ = std::move(made);
        return event_;
    }

    std::shared_ptr<CudaEventPool> pool_;
    CuStream stream_;
    mutable std::mutex mutex_;  // guards the next
    mutable std::shared_ptr<const Event> event_;
};

std::shared_ptr<CudaEventPool> CudaEventPool::make(const CudaContext& context) {
    return std::shared_ptr<CudaEventPool>(new CudaEventPool(context));
}

CudaEventPool::~CudaEventPool() {
    if (context_.is_lost()) return;
    try {
        const CudaContext::Scope scope(context_);
        for (const CuEvent event : idle_) OFFLOAD_CUDA(context_, cuEventDestroy_v2, event);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "events are left behind: ", error.what());
    }
}

std::shared_ptr<const Event> CudaEventPool::record(CuStream stream) {
    const CudaContext::Scope scope(context_);
    context_.check_not_captured(stream);
    const auto event = take();
    try {
        OFFLOAD_CUDA(context_, cuEventRecord, event, stream);
        return std::make_shared<CudaEvent>(shared_from_this(), event, stream);
    } catch (...) {
        give_back(event);
        throw;
    }
}

std::shared_ptr<const Event> CudaEventPool::record_later(CuStream stream) {
    return std::make_shared<LateCudaEvent>(shared_from_this(), stream);
}

void CudaEventPool::order(CuStream stream, const Event& event) const {
    if (const auto* const recorded = dynamic_cast<const CudaEvent*>(&event)) {
        recorded->hold_back(stream);
    } else {
        event.wait();  // of a stream that is captured, perhaps
    }
}

bool CudaEventPool::wait_for(CuStream stream) noexcept {
    try {
        const CudaContext::Scope scope(context_);
        OFFLOAD_CUDA(context_, cuStreamSynchronize, stream);
        return true;
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "waiting for a stream: ", error.what());
    }
    return context_.is_lost();
}

/// Waiting threads sleep: they share the processor with the program.
CuEvent CudaEventPool::take() {
    {
        const std::lock_guard lock(mutex_);
        if (!idle_.empty()) {
            const CuEvent event = idle_.back();
            idle_.pop_back();
            return event;
        }
    }
    CuEvent event = nullptr;
    OFFLOAD_CUDA(context_, cuEventCreate, &event, kCuEventDisableTiming | kCuEventBlockingSync);
    return event;
}

void CudaEventPool::give_back(CuEvent event) noexcept {
    const std::lock_guard lock(mutex_);
    idle_.push_back(event);
}

}  // namespace torch_offload
