#include "storage/thread_engine.h"

#include <poll.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "base/engine_thread.h"

namespace torch_offload {
namespace {

using Clock = std::chrono::steady_clock;

/// One system call for what is left of `request`; bytes moved or a negative errno.
std::int64_t transfer_once(IoRequest& request) noexcept {
    const std::span<const iovec> pieces = pieces_left(request);
    const auto count = static_cast<int>(pieces.size());
    const auto offset = static_cast<off_t>(request.offset_bytes + request.done_bytes);
    const ssize_t result = request.direction == IoDirection::read
                               ? ::preadv(request.file_descriptor, pieces.data(), count, offset)
                               : ::pwritev(request.file_descriptor, pieces.data(), count, offset);
    return result < 0 ? -static_cast<std::int64_t>(errno) : result;
}

}  // namespace

ThreadEngine::ThreadEngine(std::size_t capacity) : capacity_(capacity) {
    OFFLOAD_CHECK(capacity > 0, InvalidArgument, "an I/O engine needs a capacity of at least 1, got 0");
    queued_.reserve(capacity);
    finished_.reserve(capacity);
    try {
        start_threads();
    } catch (...) {
        stop_threads();
        throw;
    }
}

ThreadEngine::~ThreadEngine() { stop_threads(); }

void ThreadEngine::start_threads() {
    const std::size_t thread_count = std::min(capacity_, kMaxThreads);
    threads_.reserve(thread_count);
    for (std::size_t i = 0; i < thread_count; ++i) threads_.push_back(engine_thread("to-io", [this] { serve(); }));
}

void ThreadEngine::stop_threads() noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_arrived_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

bool ThreadEngine::quiesce() noexcept {
    stop_threads();
    return true;
}

std::size_t ThreadEngine::submit(std::span<IoRequest* const> requests) {
    for (const IoRequest* request : requests) check_request(*request);
    const std::size_t taken_count = std::min(requests.size(), capacity_ - in_flight_);
    for (IoRequest* request : requests.first(taken_count)) start_over(*request);
    {
        const std::lock_guard lock(mutex_);
        queued_.insert(queued_.end(), requests.begin(), requests.begin() + taken_count);
    }
    in_flight_ += taken_count;
    if (taken_count == 1) {
        work_arrived_.notify_one();
    } else {
        work_arrived_.notify_all();
    }
    return taken_count;
}

void ThreadEngine::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_arrived_.wait(lock, [this] { return stopping_ || !queued_.empty(); });
        if (stopping_) return;
        IoRequest* request = queued_.front();
        queued_.erase(queued_.begin());
        lock.unlock();
        while (settle(*request, transfer_once(*request)) == Next::resubmit) {
        }
        lock.lock();
        if (finished_.empty()) event_.raise();
        finished_.push_back(request);
    }
}

std::size_t ThreadEngine::take_finished(std::span<IoRequest*> finished) {
    event_.clear();
    const std::lock_guard lock(mutex_);
    const std::size_t count = std::min(finished.size(), finished_.size());
    std::copy_n(finished_.begin(), count, finished.begin());
    finished_.erase(finished_.begin(), finished_.begin() + static_cast<std::ptrdiff_t>(count));
    in_flight_ -= count;
    return count;
}

std::size_t ThreadEngine::reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    for (;;) {
        const std::size_t count = take_finished(finished);
        const bool was_woken = woken_.exchange(false);
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        if (count > 0 || was_woken || left.count() <= 0) return count;
        pollfd event{event_.file_descriptor(), POLLIN, 0};
        ::poll(&event, 1, static_cast<int>(std::min<std::int64_t>(left.count(), INT32_MAX)));
    }
}

void ThreadEngine::wake() noexcept {
    woken_.store(true);
    event_.raise();
}

}  // namespace torch_offload
