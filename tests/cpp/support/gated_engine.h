// An I/O engine that finishes transfers when a test lets it. Header only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/io_engine.h"

namespace torch_offload::test {

/// Keeps bytes in memory by place. What is submitted waits for open() or for its turn in finish_one(). Waits for events
/// only, however long, but for open_after(), and not at all where a caller has no time.
/// Threads: any.
class GatedEngine : public IoEngine {
public:
    std::size_t submit(std::span<IoRequest* const> requests) override {
        const std::lock_guard lock(mutex_);
        for (IoRequest* request : requests) {
            start_over(*request);
            waiting_.push_back(request);
            order_ += request->direction == IoDirection::read ? 'r' : 'w';
            most_ = std::max(most_, waiting_.size());
        }
        changed_.notify_all();
        return requests.size();
    }

    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override {
        std::unique_lock lock(mutex_);
        ++reaps_;
        const auto can_finish = [&] { return !waiting_.empty() && (is_open_ || allowed_ > 0); };
        const auto may_pause = [&] { return !waiting_.empty() && pause_.count() > 0; };
        if (timeout.count() > 0) changed_.wait(lock, [&] { return woken_ || can_finish() || may_pause(); });
        woken_ = false;
        if (may_pause()) {
            std::this_thread::sleep_for(std::exchange(pause_, {}));
            is_open_ = true;
            return 0;
        }
        std::size_t count = 0;
        for (; count < finished.size() && can_finish(); ++count) {
            if (!is_open_) --allowed_;
            finished[count] = waiting_.front();
            waiting_.pop_front();
            move_bytes(*finished[count]);
        }
        return count;
    }

    void wake() noexcept override {
        const std::lock_guard lock(mutex_);
        woken_ = true;
        changed_.notify_all();
    }

    BufferIndex register_buffer(std::span<std::byte>) override { return kUnregistered; }
    void unregister_buffer(BufferIndex) override {}
    bool quiesce() noexcept override { return true; }
    std::size_t capacity() const noexcept override { return 64; }
    std::string name() const override { return "gated"; }

    /// Nothing finishes from now on; forgets what was submitted so far.
    void shut() {
        const std::lock_guard lock(mutex_);
        is_open_ = false;
        allowed_ = 0;
        order_.clear();
        most_ = 0;
    }
    void open() {
        const std::lock_guard lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }
    /// The next reap() with something under way takes so long and finishes nothing; all after it finish everything.
    void open_after(std::chrono::milliseconds pause) {
        const std::lock_guard lock(mutex_);
        pause_ = pause;
    }
    void finish_one() {
        const std::lock_guard lock(mutex_);
        ++allowed_;
        changed_.notify_all();
    }

    /// The directions submitted since shut(), one letter each: r or w.
    std::string order() const {
        const std::lock_guard lock(mutex_);
        return order_;
    }
    /// The most transfers under way at once since shut().
    std::size_t most() const {
        const std::lock_guard lock(mutex_);
        return most_;
    }

    /// The calls of reap() that have begun.
    std::uint64_t reaps() const {
        const std::lock_guard lock(mutex_);
        return reaps_;
    }

private:
    void move_bytes(IoRequest& request) {
        std::vector<std::byte>& place = places_[request.offset_bytes];
        if (request.direction == IoDirection::write) {
            place.assign(request.buffer.begin(), request.buffer.end());
            place.insert(place.end(), request.tail.begin(), request.tail.end());
        } else {
            const std::size_t in_buffer = std::min(place.size(), request.buffer.size());
            std::memcpy(request.buffer.data(), place.data(), in_buffer);
            const std::size_t in_tail = std::min(place.size() - in_buffer, request.tail.size());
            if (in_tail > 0) std::memcpy(request.tail.data(), place.data() + in_buffer, in_tail);
        }
        request.done_bytes = request.size_bytes();
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<IoRequest*> waiting_;
    std::map<std::uint64_t, std::vector<std::byte>> places_;
    std::string order_;
    std::size_t most_ = 0;
    std::size_t allowed_ = 0;
    std::uint64_t reaps_ = 0;
    std::chrono::milliseconds pause_{};
    bool is_open_ = true;
    bool woken_ = false;
};

}  // namespace torch_offload::test
