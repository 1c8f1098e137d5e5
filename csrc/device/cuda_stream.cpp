#include "device/cuda_stream.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload {

// --- Under way ----------------------------------------------------------------------------------------------------

/// Threads: add() from the stream's; the rest from any. One finishes a copy at a time, the others wait for it.
class CudaCopies {
public:
    explicit CudaCopies(const CudaContext& context) : context_(context) {}

    /// Once `passed` has, `staged` goes to `to`, if it is anything.
    void add(std::shared_ptr<const Event> passed, std::span<std::byte> to, std::span<const std::byte> staged) {
        const std::lock_guard lock(mutex_);
        under_way_.push_back({std::move(passed), to, staged});
        ++added_;
    }

    std::uint64_t added() const {
        const std::lock_guard lock(mutex_);
        return added_;
    }

    /// Throws: TierIoError if the device is lost.
    void wait_until(std::uint64_t count) {
        std::unique_lock lock(mutex_);
        while (finished_ < count) finish_oldest(lock);
    }

    bool have_finished(std::uint64_t count) noexcept {
        std::unique_lock lock(mutex_);
        try {
            while (finished_ < count) {
                if (is_finishing_ || !under_way_.front().passed->has_passed()) return false;
                finish_oldest(lock);
            }
            return true;
        } catch (const std::exception& error) {
            OFFLOAD_LOG(debug, "a copy cannot be asked: ", error.what());
        }
        return context_.is_lost();  // it will not end
    }

private:
    struct Copy {
        std::shared_ptr<const Event> passed;
        std::span<std::byte> to;
        std::span<const std::byte> staged;
    };

    /// Lets go of the lock while it waits and copies.
    void finish_oldest(std::unique_lock<std::mutex>& lock) {
        if (is_finishing_) {
            changed_.wait(lock);
            return;
        }
        const Copy copy = under_way_.front();
        is_finishing_ = true;
        lock.unlock();
        std::exception_ptr error;
        try {
            copy.passed->wait();
            std::ranges::copy(copy.staged, copy.to.begin());
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        is_finishing_ = false;
        changed_.notify_all();
        if (error) std::rethrow_exception(error);
        under_way_.pop_front();
        ++finished_;
    }

    const CudaContext& context_;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::deque<Copy> under_way_;
    std::uint64_t added_ = 0;
    std::uint64_t finished_ = 0;
    bool is_finishing_ = false;
};

namespace {

class CopiesEvent final : public Event {
public:
    CopiesEvent(std::shared_ptr<CudaCopies> copies, std::uint64_t count) : copies_(std::move(copies)), count_(count) {}
    bool has_passed() const noexcept override { return copies_->have_finished(count_); }
    void wait() const override { copies_->wait_until(count_); }

private:
    std::shared_ptr<CudaCopies> copies_;
    std::uint64_t count_;  // of copies before it
};

CuAddress address_of(const std::byte* pointer) { return reinterpret_cast<CuAddress>(pointer); }

}  // namespace

// --- Staging ------------------------------------------------------------------------------------------------------

CudaStaging::CudaStaging(const CudaContext& context, std::size_t buffer_bytes)
    : context_(context), buffer_bytes_(round_up(buffer_bytes, kSectorBytes)) {
    AddressSpace& space = AddressSpace::process();
    memory_ = space.reserve(kBufferCount * buffer_bytes_, nullptr);
    try {
        space.commit(memory_);
        space.hide_from_fork(memory_, true);  // a fork would give one of the two a copy that the device does not know
        is_registered_ = context_.register_host(memory_);
    } catch (...) {
        space.release(memory_);
        throw;
    }
}

/// Memory that stays registered stays.
CudaStaging::~CudaStaging() {
    try {
        if (is_registered_ && !context_.is_lost()) context_.unregister_host(memory_);
        AddressSpace::process().release(memory_);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, memory_.size(), " bytes of host memory stay registered: ", error.what());
    }
}

// --- The stream ---------------------------------------------------------------------------------------------------

CudaStream::CudaStream(const CudaContext& context, std::shared_ptr<CudaEventPool> events, LinkDirection direction,
                       std::size_t buffer_bytes, const LockedMemory* host)
    : context_(context),
      events_(std::move(events)),
      direction_(direction),
      buffer_bytes_(buffer_bytes),
      host_(host),
      copies_(std::make_shared<CudaCopies>(context)) {}

void CudaStream::open() {
    if (stream_) return;
    int lowest = 0;
    int highest = 0;
    OFFLOAD_CUDA(context_, cuCtxGetStreamPriorityRange, &lowest, &highest);
    OFFLOAD_CUDA(context_, cuStreamCreateWithPriority, &stream_, kCuStreamNonBlocking, highest);
}

CudaStream::~CudaStream() {
    if (!stream_ || context_.is_lost()) return;
    try {
        wait_through_refusals(CopiesEvent(copies_, copies_->added()));
        const CudaContext::Scope scope(context_);
        OFFLOAD_CUDA(context_, cuStreamDestroy_v2, stream_);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "a stream is left behind: ", error.what());
    }
}

void CudaStream::copy(std::span<std::byte> to, std::span<const std::byte> from) {
    OFFLOAD_CHECK(to.size() == from.size(), LogicError, "a copy of ", from.size(), " bytes to ", to.size());
    const CudaContext::Scope scope(context_);
    open();
    const std::span<const std::byte> on_host = direction_ == LinkDirection::to_device ? from : to;
    if (host_ && host_->is_locked(on_host)) {
        queue(to, from);
        copies_->add(mark(), {}, {});
        return;
    }
    if (!staging_) staging_ = std::make_unique<CudaStaging>(context_, buffer_bytes_);
    if (!staging_->is_registered()) {
        queue(to, from);
        copies_->add(mark(), {}, {});
        return;
    }
    for (std::size_t begin = 0; begin < to.size(); begin += staging_->buffer_bytes()) {
        const std::size_t size_bytes = std::min(to.size() - begin, staging_->buffer_bytes());
        copy_through_buffer(to.subspan(begin, size_bytes), from.subspan(begin, size_bytes));
    }
}

void CudaStream::copy_through_buffer(std::span<std::byte> to, std::span<const std::byte> from) {
    const std::uint64_t turn = copies_->added();
    if (turn >= CudaStaging::kBufferCount) copies_->wait_until(turn + 1 - CudaStaging::kBufferCount);
    const std::span<std::byte> buffer = staging_->buffer(turn).first(to.size());
    if (direction_ == LinkDirection::to_device) {
        std::ranges::copy(from, buffer.begin());
        queue(to, buffer);
        copies_->add(mark(), {}, {});
    } else {
        queue(buffer, from);
        copies_->add(mark(), to, buffer);
    }
}

/// The point behind what is queued. Without one, now or later, nobody could tell when its memory may be used again.
std::shared_ptr<const Event> CudaStream::mark() {
    try {
        return events_->record(stream_);
    } catch (...) {
        if (events_->wait_for(stream_)) throw;
        return events_->record_later(stream_);
    }
}

void CudaStream::queue(std::span<std::byte> to, std::span<const std::byte> from) {
    if (direction_ == LinkDirection::to_device) {
        OFFLOAD_CUDA(context_, cuMemcpyHtoDAsync_v2, address_of(to.data()), from.data(), from.size(), stream_);
    } else {
        OFFLOAD_CUDA(context_, cuMemcpyDtoHAsync_v2, to.data(), address_of(from.data()), from.size(), stream_);
    }
}

std::shared_ptr<const Event> CudaStream::record() { return std::make_shared<CopiesEvent>(copies_, copies_->added()); }

}  // namespace torch_offload
