#include "device/emulated_device.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <new>
#include <random>
#include <thread>
#include <utility>

#include "base/check.h"

namespace torch_offload {
namespace {

/// How much of a stream is done, shared by the stream and its events.
struct Progress {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t done = 0;
};

class EmulatedEvent final : public Event {
public:
    EmulatedEvent(std::shared_ptr<Progress> progress, std::uint64_t position)
        : progress_(std::move(progress)), position_(position) {}

    bool has_passed() const noexcept override {
        const std::lock_guard lock(progress_->mutex);
        return progress_->done >= position_;
    }
    void wait() const override {
        std::unique_lock lock(progress_->mutex);
        progress_->changed.wait(lock, [&] { return progress_->done >= position_; });
    }

private:
    std::shared_ptr<Progress> progress_;
    std::uint64_t position_;
};

const char* name_of(LinkDirection direction) {
    return direction == LinkDirection::to_device ? "copy from the host" : "copy to the host";
}

}  // namespace

/// Carries out what is queued, one after the other, each after a delay.
class EmulatedQueue {
public:
    EmulatedQueue(std::chrono::microseconds longest_delay, std::uint64_t seed)
        : longest_delay_(longest_delay), random_(seed), worker_([this] { run(); }) {}

    /// After what is queued.
    ~EmulatedQueue() {
        {
            const std::lock_guard lock(mutex_);
            is_ending_ = true;
        }
        changed_.notify_one();
        worker_.join();
    }
    EmulatedQueue(const EmulatedQueue&) = delete;
    EmulatedQueue& operator=(const EmulatedQueue&) = delete;

    void push(std::function<void()> work) {
        {
            const std::lock_guard lock(mutex_);
            waiting_.push_back(std::move(work));
            ++queued_;
        }
        changed_.notify_one();
    }

    /// Behind all that was pushed.
    std::shared_ptr<const Event> record() {
        const std::lock_guard lock(mutex_);
        return std::make_shared<EmulatedEvent>(progress_, queued_);
    }

    /// Until all that was pushed is done.
    void wait() {
        std::unique_lock lock(progress_->mutex);
        progress_->changed.wait(lock, [&] { return progress_->done == queued_.load(); });
    }

private:
    void run() {
        while (true) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return is_ending_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            const std::function<void()> work = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            carry_out(work);
        }
    }

    void carry_out(const std::function<void()>& work) {
        const auto longest = static_cast<std::uint64_t>(longest_delay_.count());
        if (longest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % (longest + 1)));
        work();
        {
            const std::lock_guard lock(progress_->mutex);
            ++progress_->done;
        }
        progress_->changed.notify_all();
    }

    const std::chrono::microseconds longest_delay_;
    std::mt19937_64 random_;
    std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
    std::atomic<std::uint64_t> queued_{0};
    std::mutex mutex_;  // guards the next two, and that an event stands behind what was pushed before it
    std::deque<std::function<void()>> waiting_;
    bool is_ending_ = false;
    std::condition_variable changed_;
    std::thread worker_;
};

class EmulatedStream final : public Stream {
public:
    EmulatedStream(EmulatedDevice& device, LinkDirection direction, std::uint64_t seed)
        : device_(device), direction_(direction), queue_(device.options_.longest_delay, seed) {}

    void copy(std::span<std::byte> to, std::span<const std::byte> from) override {
        OFFLOAD_CHECK(to.size() == from.size(), LogicError, "a copy of ", from.size(), " bytes to ", to.size());
        const std::span<const std::byte> memory[] = {to, from};
        device_.push(queue_, memory, name_of(direction_), [this, to, from] { carry_out(to, from); });
    }

    std::shared_ptr<const Event> record() override { return queue_.record(); }

private:
    void carry_out(std::span<std::byte> to, std::span<const std::byte> from) {
        const auto end = device_.end_of_copy(direction_, from.size());
        std::memcpy(to.data(), from.data(), from.size());
        std::this_thread::sleep_until(end);
    }

    EmulatedDevice& device_;
    const LinkDirection direction_;
    EmulatedQueue queue_;
};

EmulatedDevice::EmulatedDevice(const EmulatedDeviceOptions& options) : options_(options) {}

EmulatedDevice::~EmulatedDevice() = default;

std::unique_ptr<Stream> EmulatedDevice::make_stream(LinkDirection direction) {
    std::uint64_t number = 0;
    {
        const std::lock_guard lock(mutex_);
        number = streams_made_++;
    }
    return std::make_unique<EmulatedStream>(*this, direction, options_.seed + number);
}

void EmulatedDevice::launch(const std::vector<std::span<std::byte>>& memory, std::function<void()> kernel) {
    EmulatedQueue* kernels = nullptr;
    {
        const std::lock_guard lock(mutex_);
        if (!kernels_) kernels_ = std::make_unique<EmulatedQueue>(options_.longest_delay, ~options_.seed);
        kernels = kernels_.get();
    }
    push(*kernels, std::vector<std::span<const std::byte>>(memory.begin(), memory.end()), "kernel", kernel);
}

void EmulatedDevice::push(EmulatedQueue& queue, std::span<const std::span<const std::byte>> memory, const char* who,
                          const std::function<void()>& work) {
    std::function<void()> whole = [this, work, used = std::vector(memory.begin(), memory.end())] {
        work();
        for (const std::span<const std::byte> part : used) end_use(part);
    };
    std::size_t begun = 0;
    try {
        for (; begun < memory.size(); ++begun) begin_use(memory[begun], who);
        queue.push(std::move(whole));
    } catch (...) {
        while (begun > 0) end_use(memory[--begun]);
        throw;
    }
}

/// Without memory for an event, all that was launched is done once this returns.
std::shared_ptr<const Event> EmulatedDevice::fence_use() noexcept {
    const std::lock_guard lock(mutex_);
    if (!kernels_) return nullptr;
    try {
        return kernels_->record();
    } catch (const std::bad_alloc&) {
        kernels_->wait();
        return nullptr;
    }
}

/// A copy or kernel that overlaps `memory` and has not ended, or nullptr; the lock is held.
const EmulatedDevice::Use* EmulatedDevice::use_of(std::span<const std::byte> memory) const {
    // Whoever overlaps begins before the end, and not further before the beginning than the longest reaches.
    auto use = uses_.lower_bound(memory.data() - longest_use_bytes_);
    for (; use != uses_.end() && use->first < memory.data() + memory.size(); ++use) {
        if (use->first + use->second.size_bytes > memory.data()) return &use->second;
    }
    return nullptr;
}

/// Waits before it throws: what is found here would otherwise be a copy to memory that is gone.
void EmulatedDevice::check_idle(std::span<const std::byte> memory) const {
    std::unique_lock lock(mutex_);
    const Use* const use = use_of(memory);
    if (!use) return;
    const char* const who = use->who;
    use_ended_.wait(lock, [&] { return use_of(memory) == nullptr; });
    throw LogicError(concat(memory.size(), " bytes are used before the emulated device's ", who, " has passed"));
}

void EmulatedDevice::poison(std::span<std::byte> memory) noexcept { std::memset(memory.data(), 0xFF, memory.size()); }

void EmulatedDevice::begin_use(std::span<const std::byte> memory, const char* who) {
    const std::lock_guard lock(mutex_);
    longest_use_bytes_ = std::max(longest_use_bytes_, memory.size());
    uses_.emplace(memory.data(), Use{memory.size(), who});
}

void EmulatedDevice::end_use(std::span<const std::byte> memory) {
    const std::lock_guard lock(mutex_);
    uses_.erase(uses_.find(memory.data()));
    use_ended_.notify_all();
}

EmulatedDevice::Clock::time_point EmulatedDevice::end_of_copy(LinkDirection direction, std::size_t size_bytes) {
    const double rate = options_.bytes_per_second[static_cast<std::size_t>(direction)];
    const auto now = Clock::now();
    if (rate <= 0) return now;
    const std::lock_guard lock(mutex_);
    Clock::time_point& link_free = link_free_[static_cast<std::size_t>(direction)];
    const std::chrono::duration<double> takes(static_cast<double>(size_bytes) / rate);
    link_free = std::max(link_free, now) + std::chrono::duration_cast<Clock::duration>(takes);
    return link_free;
}

}  // namespace torch_offload
