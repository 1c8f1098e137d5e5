#include "device/emulated_device.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
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
    return direction == LinkDirection::to_device ? "from the host" : "to the host";
}

}  // namespace

class EmulatedStream final : public Stream {
public:
    EmulatedStream(EmulatedDevice& device, LinkDirection direction, std::uint64_t seed)
        : device_(device), direction_(direction), random_(seed), worker_([this] { run(); }) {}

    ~EmulatedStream() override {
        {
            const std::lock_guard lock(mutex_);
            is_ending_ = true;
        }
        changed_.notify_one();
        worker_.join();
    }

    void copy(std::span<std::byte> to, std::span<const std::byte> from) override {
        OFFLOAD_CHECK(to.size() == from.size(), LogicError, "a copy of ", from.size(), " bytes to ", to.size());
        device_.begin_use(to, direction_);
        device_.begin_use(from, direction_);
        {
            const std::lock_guard lock(mutex_);
            copies_.push_back({to, from});
            ++queued_;
        }
        changed_.notify_one();
    }

    std::shared_ptr<const Event> record() override { return std::make_shared<EmulatedEvent>(progress_, queued_); }

private:
    struct Copy {
        std::span<std::byte> to;
        std::span<const std::byte> from;
    };

    void run() {
        while (true) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return is_ending_ || !copies_.empty(); });
            if (copies_.empty()) return;
            const Copy copy = copies_.front();
            copies_.pop_front();
            lock.unlock();
            carry_out(copy);
        }
    }

    void carry_out(const Copy& copy) {
        const auto longest = static_cast<std::uint64_t>(device_.options_.longest_delay.count());
        if (longest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % (longest + 1)));
        const auto end = device_.end_of_copy(direction_, copy.from.size());
        std::memcpy(copy.to.data(), copy.from.data(), copy.from.size());
        std::this_thread::sleep_until(end);
        device_.end_use(copy.to);
        device_.end_use(copy.from);
        {
            const std::lock_guard lock(progress_->mutex);
            ++progress_->done;
        }
        progress_->changed.notify_all();
    }

    EmulatedDevice& device_;
    const LinkDirection direction_;
    std::mt19937_64 random_;
    std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
    std::uint64_t queued_ = 0;  // copies so far; the thread's that fills the stream
    std::mutex mutex_;          // guards the next two
    std::deque<Copy> copies_;
    bool is_ending_ = false;
    std::condition_variable changed_;
    std::thread worker_;
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

/// A copy that overlaps `memory` and has not ended, or nullptr; the lock is held.
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
    const LinkDirection direction = use->direction;
    use_ended_.wait(lock, [&] { return use_of(memory) == nullptr; });
    throw LogicError(
        concat(memory.size(), " bytes are used before the emulated device's copy ", name_of(direction), " has passed"));
}

void EmulatedDevice::poison(std::span<std::byte> memory) noexcept { std::memset(memory.data(), 0xFF, memory.size()); }

void EmulatedDevice::begin_use(std::span<const std::byte> memory, LinkDirection direction) {
    const std::lock_guard lock(mutex_);
    longest_use_bytes_ = std::max(longest_use_bytes_, memory.size());
    uses_.emplace(memory.data(), Use{memory.size(), direction});
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
