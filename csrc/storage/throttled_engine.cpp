#include "storage/throttled_engine.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace torch_offload {

ThrottledEngine::ThrottledEngine(std::unique_ptr<IoEngine> engine, double bytes_per_second)
    : engine_(std::move(engine)), bytes_per_second_(bytes_per_second) {
    OFFLOAD_CHECK(bytes_per_second > 0, InvalidArgument, "a disk of ", bytes_per_second, " bytes per second");
}

std::size_t ThrottledEngine::submit(std::span<IoRequest* const> requests) {
    const std::size_t free_slots = capacity() - ends_.size();  // what the engine has done and is kept here counts
    const std::size_t taken = engine_->submit(requests.first(std::min(requests.size(), free_slots)));
    const Clock::time_point now = Clock::now();
    for (IoRequest* request : requests.first(taken)) {
        const std::chrono::duration<double> takes(static_cast<double>(request->size_bytes()) / bytes_per_second_);
        free_at_ = std::max(free_at_, now) + std::chrono::duration_cast<Clock::duration>(takes);
        ends_[request] = free_at_;
    }
    return taken;
}

std::size_t ThrottledEngine::reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) {
    const Clock::time_point deadline = Clock::now() + timeout;
    std::vector<IoRequest*> batch(engine_->capacity());
    while (true) {
        const Clock::time_point now = Clock::now();
        if (const std::size_t count = take_due(finished, now); count > 0) return count;
        const bool is_woken = is_woken_.exchange(false, std::memory_order_acq_rel);
        const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::min(next_due(), deadline) - now);
        const std::size_t count = engine_->reap(batch, is_woken ? std::chrono::milliseconds(0) : wait);
        done_.insert(done_.end(), batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(count));
        if (is_woken || Clock::now() >= deadline) return take_due(finished, Clock::now());
    }
}

void ThrottledEngine::wake() noexcept {
    is_woken_.store(true, std::memory_order_release);
    engine_->wake();
}

std::size_t ThrottledEngine::take_due(std::span<IoRequest*> finished, Clock::time_point now) {
    const auto due =
        std::partition(done_.begin(), done_.end(), [&](IoRequest* request) { return ends_.at(request) > now; });
    const std::size_t count = std::min(finished.size(), static_cast<std::size_t>(done_.end() - due));
    for (std::size_t i = 0; i < count; ++i) {
        finished[i] = done_.back();
        ends_.erase(done_.back());
        done_.pop_back();
    }
    return count;
}

/// Of what the engine has done; far away if there is none.
ThrottledEngine::Clock::time_point ThrottledEngine::next_due() const {
    Clock::time_point earliest = Clock::now() + std::chrono::hours(1);
    for (IoRequest* request : done_) earliest = std::min(earliest, ends_.at(request));
    return earliest;
}

}  // namespace torch_offload
