#include "storage/fallback_engine.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "storage/thread_engine.h"

namespace torch_offload {

FallbackEngine::FallbackEngine(std::unique_ptr<IoEngine> first, MakeEngine make_second)
    : first_(std::move(first)), make_second_(std::move(make_second)), current_(first_.get()) {
    if (make_second_) return;
    make_second_ = [](std::size_t capacity) { return std::make_unique<ThreadEngine>(capacity); };
}

/// An engine that throws may have taken some of the requests: all that there was room for count as taken, and are made
/// by the second.
std::size_t FallbackEngine::submit(std::span<IoRequest* const> requests) {
    const std::size_t room = std::min(requests.size(), capacity() - in_flight_.size());
    std::size_t taken = 0;
    try {
        in_flight_.insert(requests.begin(), requests.begin() + static_cast<std::ptrdiff_t>(room));
        taken = current_.load(std::memory_order_relaxed)->submit(requests.first(room));
    } catch (const TierIoError& error) {
        if (second_) throw;
        fall_back(error);
        return room;
    } catch (...) {
        for (IoRequest* request : requests.first(room)) in_flight_.erase(request);
        throw;
    }
    for (IoRequest* request : requests.subspan(taken, room - taken)) in_flight_.erase(request);
    return taken;
}

std::size_t FallbackEngine::reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) {
    std::size_t count = 0;
    try {
        count = current_.load(std::memory_order_relaxed)->reap(finished, timeout);
    } catch (const TierIoError& error) {
        if (second_) throw;
        fall_back(error);
        count = second_->reap(finished, timeout);
    }
    for (IoRequest* request : finished.first(count)) in_flight_.erase(request);
    return count;
}

/// Ends the first engine and gives what it had to the second. Memory that the kernel may still fill is not given on.
/// Throws: `error` if there is no memory for a second engine.
void FallbackEngine::fall_back(const TierIoError& error) {
    OFFLOAD_LOG(warning, "I/O engine ", first_->name(), " failed (", error.what(), "): threads carry out its ",
                in_flight_.size(), " transfers and all later ones");
    std::vector<IoRequest*> again;
    try {
        again.assign(in_flight_.begin(), in_flight_.end());
        second_ = make_second_(capacity());
    } catch (const std::exception& second_error) {
        OFFLOAD_LOG(error, "no engine to take over: ", second_error.what());
        throw error;
    }
    while (!first_->quiesce()) OFFLOAD_LOG(error, "transfers of the failed I/O engine are still under way, waiting");
    current_.store(second_.get(), std::memory_order_release);
    const std::size_t taken = second_->submit(again);
    OFFLOAD_CHECK(taken == again.size(), LogicError, "the second I/O engine took ", taken, " of ", again.size(),
                  " transfers");
    second_->wake();  // whoever woke the first one meanwhile
}

BufferIndex FallbackEngine::register_buffer(std::span<std::byte> memory) {
    return second_ ? kUnregistered : first_->register_buffer(memory);
}

/// Registrations of the first engine have ended with it.
void FallbackEngine::unregister_buffer(BufferIndex index) {
    if (!second_) first_->unregister_buffer(index);
}

}  // namespace torch_offload
