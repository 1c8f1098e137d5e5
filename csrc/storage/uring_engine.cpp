#include "storage/uring_engine.h"

#include "base/check.h"

#ifndef TORCH_OFFLOAD_HAVE_LIBURING

namespace torch_offload {

std::unique_ptr<IoEngine> make_uring_engine(UringBuffers, std::size_t) {
    throw InvalidArgument("this build has no liburing; install its headers and build again");
}

}  // namespace torch_offload

#else

#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/units.h"
#include "storage/file_descriptor.h"
#include "storage/wake_event.h"

namespace torch_offload {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kMaxCapacity = 8192;
constexpr unsigned kMaxBuffers = 16384;           // the kernel's IORING_MAX_REG_BUFFERS
constexpr std::size_t kMaxTransferBytes = kGiB;   // per entry; the rest of a larger request is a short transfer
constexpr milliseconds kTransferTimeout{30'000};  // for transfers in flight when the engine is destroyed
constexpr milliseconds kTeardownTimeout{1'000};   // for an idle ring; longer only if a forked child holds it too
constexpr milliseconds kBusyPause{1};

/// A kernel ring and the proof of its end. The kernel tears a closed ring down in its own time, so the ring holds the
/// only write end of a pipe, as a registered file: the read end hangs up once every request is done.
class Ring {
public:
    explicit Ring(unsigned entries) {
        int error = init(entries, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED |
                                      IORING_SETUP_SUBMIT_ALL);
        if (error == -EINVAL) error = init(entries, IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL);
        if (error == -EINVAL) error = init(entries, 0);
        OFFLOAD_CHECK(error == 0, InvalidArgument, "io_uring_setup: ", std::strerror(-error), hint(-error));
        // Waiting with a timeout and completions that are never dropped: Linux 5.11.
        constexpr unsigned needed = IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP;
        if ((ring_.features & needed) != needed || !hold_pipe()) {
            ::io_uring_queue_exit(&ring_);
            throw InvalidArgument("the kernel's io_uring is too old (5.11 is needed) or refuses to register a file");
        }
    }
    ~Ring() { ::io_uring_queue_exit(&ring_); }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    ::io_uring* get() noexcept { return &ring_; }
    bool single_issuer() const noexcept { return (ring_.flags & IORING_SETUP_SINGLE_ISSUER) != 0; }

    /// Makes this thread the issuer. By system call: some releases of liburing do not export the function.
    void enable() {
        if ((ring_.flags & IORING_SETUP_R_DISABLED) == 0) return;
        const long result = ::syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
        OFFLOAD_CHECK(result == 0, LogicError, "cannot enable the ring: ", std::strerror(errno));
    }

    /// For the destructor of the owner: gives the read end away, to be polled after the ring is closed.
    FileDescriptor take_pipe() noexcept { return std::move(pipe_); }

private:
    int init(unsigned entries, unsigned flags) {
        ::io_uring_params parameters{};
        parameters.flags = flags;
        return ::io_uring_queue_init_params(entries, &ring_, &parameters);
    }

    bool hold_pipe() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) return false;
        pipe_ = FileDescriptor(ends[0]);
        const FileDescriptor write_end(ends[1]);
        return ::io_uring_register_files(&ring_, &ends[1], 1) == 0;
    }

    static const char* hint(int error) {
        switch (error) {
            case EPERM:
                return " (a container's seccomp profile or kernel.io_uring_disabled forbids it)";
            case ENOSYS:
                return " (the kernel or the sandbox has no io_uring)";
            case ENOMEM:
                return " (raise the limit on locked memory, ulimit -l)";
            default:
                return "";
        }
    }

    ::io_uring ring_{};
    FileDescriptor pipe_;
};

/// False if the other end was still open after `timeout`.
bool wait_for_hang_up(int pipe, milliseconds timeout) noexcept {
    pollfd hang_up{pipe, 0, 0};
    int result = 0;
    do {
        result = ::poll(&hang_up, 1, static_cast<int>(timeout.count()));
    } while (result < 0 && errno == EINTR);
    return result == 1;
}

class UringEngine final : public IoEngine {
public:
    UringEngine(UringBuffers buffers, std::size_t capacity)
        : capacity_(capacity), buffers_(buffers), ring_(std::make_unique<Ring>(static_cast<unsigned>(capacity) + 1)) {
        if (buffers == UringBuffers::fixed) make_buffer_table();
    }

    ~UringEngine() override;
    bool quiesce() noexcept override;

    std::size_t submit(std::span<IoRequest* const> requests) override;
    std::size_t reap(std::span<IoRequest*> finished, milliseconds timeout) override;
    void wake() noexcept override { event_.raise(); }
    BufferIndex register_buffer(std::span<std::byte> memory) override;
    void unregister_buffer(BufferIndex index) override;
    std::size_t capacity() const noexcept override { return capacity_; }
    std::string name() const override {
        return buffers_ == UringBuffers::fixed ? "io_uring with fixed buffers" : "io_uring";
    }

private:
    void own();
    void make_buffer_table();
    bool set_buffer(BufferIndex index, std::span<std::byte> memory);
    ::io_uring_sqe* next_entry();
    void queue(IoRequest& request);
    void arm_wake();
    std::size_t harvest(std::span<IoRequest*> finished);
    void flush();
    void wait(milliseconds timeout);
    void drain() noexcept;

    const std::size_t capacity_;
    const UringBuffers buffers_;
    const pid_t process_ = ::getpid();
    std::thread::id owner_;  // none before the first call
    std::size_t in_flight_ = 0;
    bool woken_ = false;
    bool is_refusal_told_ = false;  // to register memory
    std::vector<BufferIndex> free_buffers_;
    WakeEvent event_;             // its poll stays armed in the ring under the user data nullptr
    std::unique_ptr<Ring> ring_;  // none once the engine has ended
    FileDescriptor pipe_;         // then: hangs up after the last transfer
};

UringEngine::~UringEngine() {
    if (quiesce()) return;
    OFFLOAD_LOG(error, "io_uring: ", in_flight_, " transfers still ran ", kTransferTimeout.count() / 1000,
                " s after the end of their engine; their memory may yet change");
}

/// A forked child only lets go of its copies: the transfers are the parent's.
bool UringEngine::quiesce() noexcept {
    const bool in_parent = process_ == ::getpid();
    if (ring_) {
        if (in_parent && (owner_ == std::this_thread::get_id() || !ring_->single_issuer())) drain();
        pipe_ = ring_->take_pipe();
        ring_.reset();
    }
    // With transfers still in flight, their owner's thread is gone and only the kernel knows when they end. With none,
    // what matters is that locked memory is given back, so that the next engine can register as much.
    if (!in_parent) return true;
    const bool has_ended = wait_for_hang_up(pipe_.get(), in_flight_ > 0 ? kTransferTimeout : kTeardownTimeout);
    if (has_ended) in_flight_ = 0;
    return in_flight_ == 0;
}

/// The first caller becomes the only issuer.
void UringEngine::own() {
    const std::thread::id caller = std::this_thread::get_id();
    if (owner_ == std::thread::id{}) {
        ring_->enable();
        owner_ = caller;
        arm_wake();
    }
    OFFLOAD_CHECK(owner_ == caller, LogicError, "an I/O engine belongs to the thread that made the first call");
}

void UringEngine::make_buffer_table() {
    const int error = ::io_uring_register_buffers_sparse(ring_->get(), kMaxBuffers);
    OFFLOAD_CHECK(error == 0, InvalidArgument, "io_uring buffer table: ", std::strerror(-error));
    free_buffers_.resize(kMaxBuffers);
    std::iota(free_buffers_.rbegin(), free_buffers_.rend(), 0);
}

/// Fills a slot of the table, or empties it with empty `memory`.
bool UringEngine::set_buffer(BufferIndex index, std::span<std::byte> memory) {
    const iovec piece{memory.data(), memory.size()};
    const __u64 tag = 0;
    int result = 0;
    do {
        result = ::io_uring_register_buffers_update_tag(ring_->get(), static_cast<unsigned>(index), &piece, &tag, 1);
    } while (result == -EINTR);
    return result == 1;
}

BufferIndex UringEngine::register_buffer(std::span<std::byte> memory) {
    own();
    if (free_buffers_.empty() || memory.empty()) return kUnregistered;
    const BufferIndex index = free_buffers_.back();
    if (!set_buffer(index, memory)) {
        if (!std::exchange(is_refusal_told_, true)) {
            OFFLOAD_LOG(info, "io_uring: the kernel registers no more memory after ",
                        kMaxBuffers - free_buffers_.size(),
                        " buffers; transfers of other memory cost it a little more; raise the limit on locked memory "
                        "(ulimit -l)");
        }
        return kUnregistered;
    }
    free_buffers_.pop_back();
    return index;
}

void UringEngine::unregister_buffer(BufferIndex index) {
    own();
    if (index == kUnregistered) return;
    OFFLOAD_CHECK(buffers_ == UringBuffers::fixed && index >= 0 && index < static_cast<BufferIndex>(kMaxBuffers),
                  InvalidArgument, "no buffer is registered as number ", index);
    if (set_buffer(index, {})) {
        free_buffers_.push_back(index);
    } else {  // the kernel keeps the memory until the ring ends; what is registered in its place has another slot
        OFFLOAD_LOG(warning, "io_uring: the kernel keeps the registered memory of a buffer that is not used any more");
    }
}

/// There is always one: the ring has an entry for each request in flight and one for the wake poll.
::io_uring_sqe* UringEngine::next_entry() {
    ::io_uring_sqe* entry = ::io_uring_get_sqe(ring_->get());
    OFFLOAD_CHECK(entry != nullptr, LogicError, "the ring has fewer entries than requests in flight");
    return entry;
}

void UringEngine::arm_wake() {
    ::io_uring_sqe* entry = next_entry();
    ::io_uring_prep_poll_add(entry, event_.file_descriptor(), POLLIN);
    ::io_uring_sqe_set_data(entry, nullptr);
}

/// Queues what is left of `request`.
void UringEngine::queue(IoRequest& request) {
    ::io_uring_sqe* entry = next_entry();
    const bool is_read = request.direction == IoDirection::read;
    const std::uint64_t offset_bytes = request.offset_bytes + request.done_bytes;
    const int file = request.file_descriptor;
    if (request.fixed_index != kUnregistered) {
        std::byte* const address = request.fixed_address + request.done_bytes;
        const std::size_t left_bytes = request.buffer.size() - request.done_bytes;
        const auto size_bytes = static_cast<unsigned>(std::min(left_bytes, kMaxTransferBytes));
        is_read ? ::io_uring_prep_read_fixed(entry, file, address, size_bytes, offset_bytes, request.fixed_index)
                : ::io_uring_prep_write_fixed(entry, file, address, size_bytes, offset_bytes, request.fixed_index);
    } else {
        const std::span<const iovec> pieces = pieces_left(request);
        const auto count = static_cast<unsigned>(pieces.size());
        is_read ? ::io_uring_prep_readv(entry, file, pieces.data(), count, offset_bytes)
                : ::io_uring_prep_writev(entry, file, pieces.data(), count, offset_bytes);
    }
    ::io_uring_sqe_set_data(entry, &request);
}

std::size_t UringEngine::submit(std::span<IoRequest* const> requests) {
    own();
    for (const IoRequest* request : requests) check_request(*request);
    const std::size_t taken_count = std::min(requests.size(), capacity_ - in_flight_);
    for (IoRequest* request : requests.first(taken_count)) {
        start_over(*request);
        queue(*request);
        ++in_flight_;
    }
    flush();
    return taken_count;
}

/// Hands queued entries to the kernel. What it refuses for now (EAGAIN, EBUSY) stays queued and goes with the next
/// call: the entries are the ring's either way.
void UringEngine::flush() {
    while (::io_uring_sq_ready(ring_->get()) > 0) {
        const int result = ::io_uring_submit(ring_->get());
        if (result > 0 || result == -EINTR) continue;
        if (result == 0 || result == -EAGAIN || result == -EBUSY) return;
        throw TierIoError(concat("io_uring_enter: ", std::strerror(-result)), -result);
    }
}

/// Takes finished requests out of the completion queue; queues the rest of short ones anew.
std::size_t UringEngine::harvest(std::span<IoRequest*> finished) {
    std::size_t count = 0;
    ::io_uring_cqe* completion = nullptr;
    while (count < finished.size() && ::io_uring_peek_cqe(ring_->get(), &completion) == 0) {
        auto* request = static_cast<IoRequest*>(::io_uring_cqe_get_data(completion));
        const int result = completion->res;
        ::io_uring_cqe_seen(ring_->get(), completion);
        if (request == nullptr) {
            event_.clear();
            woken_ = true;
            arm_wake();
        } else if (settle(*request, result) == Next::resubmit) {
            queue(*request);
        } else {
            finished[count++] = request;
            --in_flight_;
        }
    }
    return count;
}

/// Submits what is queued, then lets the kernel run until something completes or `timeout` passes.
void UringEngine::wait(milliseconds timeout) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    __kernel_timespec limit{.tv_sec = seconds.count(), .tv_nsec = std::chrono::nanoseconds(timeout - seconds).count()};
    ::io_uring_cqe* completion = nullptr;
    const int result = ::io_uring_submit_and_wait_timeout(ring_->get(), &completion, 1, &limit, nullptr);
    if (result >= 0 || result == -ETIME || result == -EINTR) return;
    if (result != -EAGAIN && result != -EBUSY) {
        throw TierIoError(concat("io_uring_enter: ", std::strerror(-result)), -result);
    }
    pollfd event{event_.file_descriptor(), POLLIN, 0};
    ::poll(&event, 1, static_cast<int>(kBusyPause.count()));
}

std::size_t UringEngine::reap(std::span<IoRequest*> finished, milliseconds timeout) {
    own();
    const auto deadline = Clock::now() + timeout;
    for (bool is_last_look = false;;) {
        const std::size_t count = harvest(finished);
        if (count > 0 || woken_ || is_last_look) {
            woken_ = false;
            flush();
            return count;
        }
        const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
        is_last_look = left.count() <= 0;
        wait(std::max(left, milliseconds{0}));
    }
}

/// Waits for what is in flight; results are dropped and nothing goes round again.
void UringEngine::drain() noexcept {
    const auto deadline = Clock::now() + kTransferTimeout;
    try {
        while (in_flight_ > 0 && Clock::now() < deadline) {
            wait(kBusyPause * 100);
            ::io_uring_cqe* completion = nullptr;
            while (::io_uring_peek_cqe(ring_->get(), &completion) == 0) {
                if (::io_uring_cqe_get_data(completion) != nullptr) --in_flight_;
                ::io_uring_cqe_seen(ring_->get(), completion);
            }
        }
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "io_uring: cannot wait for ", in_flight_, " transfers: ", error.what());
    }
}

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(UringBuffers buffers, std::size_t capacity) {
    OFFLOAD_CHECK(capacity > 0 && capacity <= kMaxCapacity, InvalidArgument, "the capacity of io_uring is 1 to ",
                  kMaxCapacity, " requests, got ", capacity);
    return std::make_unique<UringEngine>(buffers, capacity);
}

}  // namespace torch_offload

#endif
