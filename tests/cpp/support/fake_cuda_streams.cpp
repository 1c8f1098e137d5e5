// Streams of the fake driver, events, and its beginning and end.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "support/fake_cuda.h"

namespace torch_offload::test {
namespace {

/// What a graph cannot note down, so that a capture forbids it. A driver of CUDA 13 refuses the first five; the
/// rest are refused here because the documentation gives an allocation as its example.
constexpr std::array kUnsafeSymbols = {
    "cuEventQuery",        "cuEventSynchronize", "cuStreamSynchronize", "cuMemHostRegister_v2",
    "cuMemHostUnregister", "cuMemCreate",        "cuMemRelease",        "cuMemMap",
    "cuMemUnmap",
};

bool overlap(std::span<const std::byte> a, const std::byte* begin, std::size_t size_bytes) {
    return begin < a.data() + a.size() && a.data() < begin + size_bytes;
}

}  // namespace

FakeCuda* FakeCuda::current_ = nullptr;
thread_local int FakeCuda::context_depth_ = 0;
thread_local CuCaptureMode FakeCuda::capture_mode_ = CuCaptureMode::global;

/// What a stream runs, in order. The fake's lock covers `done` and `queued`.
class FakeCuda::Worker {
public:
    Worker(FakeCuda& cuda, std::uint64_t seed) : cuda_(cuda), random_(seed), thread_([this] { run(); }) {}
    ~Worker() {
        {
            const std::lock_guard lock(cuda_.mutex_);
            is_ending_ = true;
        }
        cuda_.changed_.notify_all();
        thread_.join();
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    /// The fake's lock is held.
    void push(std::function<void()> work) {
        waiting_.push_back(std::move(work));
        cuda_.changed_.notify_all();
    }
    bool has_begun_all() const { return waiting_.empty(); }
    bool is_idle() const { return waiting_.empty() && !is_running_; }

private:
    void run() {
        Lock lock(cuda_.mutex_);
        while (true) {
            cuda_.changed_.wait(lock, [&] { return is_ending_ || (!waiting_.empty() && !cuda_.is_held_); });
            if (waiting_.empty()) return;
            const std::function<void()> work = std::move(waiting_.front());
            waiting_.pop_front();
            is_running_ = true;
            lock.unlock();
            const auto longest = static_cast<std::uint64_t>(cuda_.options_.longest_delay.count());
            if (longest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % (longest + 1)));
            work();
            lock.lock();
            is_running_ = false;
            cuda_.changed_.notify_all();
        }
    }

    FakeCuda& cuda_;
    std::mt19937_64 random_;
    std::deque<std::function<void()>> waiting_;
    bool is_running_ = false;
    bool is_ending_ = false;
    std::thread thread_;
};

FakeCuda::FakeCuda(const FakeCudaOptions& options) : options_(options) {
    EXPECT_EQ(current_, nullptr) << "one fake at a time";
    current_ = this;
}

FakeCuda::~FakeCuda() {
    if (compute_stream_) streams_.erase(compute_stream_);
    streams_.erase(nullptr);
    for (const CuStream stream : blocking_) streams_.erase(stream);
    EXPECT_EQ(captures_.size(), 0u) << "captures";
    report_what_is_left();
    streams_.clear();
    for (const auto& [address, size] : reserved_) ::munmap(pointer_to(address), size);
    for (const auto& [id, granule] : created_) ::close(granule.file);
    current_ = nullptr;
}

void FakeCuda::report_what_is_left() {
    if (lost_by_ != CuResult::success) return;
    EXPECT_EQ(retained_, 0) << "contexts";
    EXPECT_EQ(reserved_.size(), 0u) << "ranges of addresses";
    EXPECT_EQ(mapped_.size(), 0u) << "mappings";
    EXPECT_EQ(created_.size(), 0u) << "granules of memory";
    EXPECT_EQ(registered_.size(), 0u) << "registered host memory";
    EXPECT_EQ(streams_.size(), 0u) << "streams";
    EXPECT_EQ(events_.size(), 0u) << "events";
}

// --- What tests ask for -------------------------------------------------------------------------------------------

void FakeCuda::hold() {
    const std::lock_guard lock(mutex_);
    is_held_ = true;
}

void FakeCuda::let_go() {
    const std::lock_guard lock(mutex_);
    is_held_ = false;
    changed_.notify_all();
}

CuStream FakeCuda::compute_stream() {
    const std::lock_guard lock(mutex_);
    if (compute_stream_) return compute_stream_;
    compute_stream_ = reinterpret_cast<CuStream>(next_id_++);
    streams_.emplace(compute_stream_, std::make_unique<Worker>(*this, ~options_.seed));
    return compute_stream_;
}

CuStream FakeCuda::blocking_stream() {
    const std::lock_guard lock(mutex_);
    const auto stream = reinterpret_cast<CuStream>(next_id_++);
    streams_.emplace(stream, std::make_unique<Worker>(*this, options_.seed));
    blocking_.insert(stream);
    return stream;
}

void FakeCuda::launch(const std::vector<std::span<std::byte>>& memory, std::function<void()> kernel) {
    launch_in(compute_stream(), memory, std::move(kernel));
}

void FakeCuda::launch_in(CuStream stream, const std::vector<std::span<std::byte>>& memory,
                         std::function<void()> kernel) {
    const std::vector<std::span<const std::byte>> used(memory.begin(), memory.end());
    EXPECT_EQ(enqueue(stream, used,
                      [this, used, kernel = std::move(kernel)] {
                          for (const auto& part : used) EXPECT_TRUE(is_mapped(part)) << "a kernel's memory is gone";
                          kernel();
                      }),
              CuResult::success);
}

// --- Captures -----------------------------------------------------------------------------------------------------

void FakeCuda::begin_capture(CuStream stream, CuCaptureMode mode) {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(captures_.emplace(stream, Capture{mode, std::this_thread::get_id()}).second) << "captured twice";
}

bool FakeCuda::end_capture(CuStream stream) {
    const std::lock_guard lock(mutex_);
    const auto node = captures_.extract(stream);
    EXPECT_FALSE(node.empty()) << "no capture to end";
    return !node.empty() && node.mapped().is_valid;
}

/// Whether the calling thread may not make the call. The lock is held.
bool FakeCuda::invalidate_captures_that_forbid(const std::string& symbol) {
    if (capture_mode_ == CuCaptureMode::relaxed || std::ranges::count(kUnsafeSymbols, symbol) == 0) return false;
    bool is_forbidden = false;
    for (auto& [stream, capture] : captures_) {
        const bool is_heeded = capture.thread == std::this_thread::get_id()
                                   ? capture.mode != CuCaptureMode::relaxed
                                   : capture.mode == CuCaptureMode::global && capture_mode_ == CuCaptureMode::global;
        if (!is_heeded) continue;
        capture.is_valid = false;
        is_forbidden = true;
    }
    return is_forbidden;
}

/// Whether there is one that the stream belongs to, or waits for as the default stream. The lock is held.
bool FakeCuda::invalidate_capture_of(CuStream stream) {
    bool is_captured = false;
    for (auto& [captured, capture] : captures_) {
        if (captured != stream && (stream != nullptr || !blocking_.contains(captured))) continue;
        capture.is_valid = false;
        is_captured = true;
    }
    return is_captured;
}

/// Also a relaxed thread may not ask about a point of a graph, and it stays a graph's. The lock is held.
CuResult FakeCuda::refuse_captured(const EventState& event) {
    return invalidate_capture_of(event.captured_in) ? CuResult::captured_event : CuResult::invalid_value;
}

CuResult FakeCuda::cuThreadExchangeStreamCaptureMode(CuCaptureMode* mode) {
    if (context_depth_ == 0) return CuResult::invalid_context;
    std::swap(*mode, capture_mode_);
    return CuResult::success;
}

/// Asking about the default stream breaks nothing, using it would.
CuResult FakeCuda::cuStreamIsCapturing(CuStream stream, int* status) {
    const std::lock_guard lock(mutex_);
    const auto is_blocking = [&](const auto& capture) { return blocking_.contains(capture.first); };
    if (stream == nullptr && std::ranges::any_of(captures_, is_blocking)) return CuResult::capture_implicit;
    const auto found = captures_.find(stream);
    *status = is_capturing_ ? kCuCaptureActive : kCuCaptureNone;
    if (found != captures_.end()) *status = found->second.is_valid ? kCuCaptureActive : kCuCaptureInvalidated;
    return CuResult::success;
}

// --- The driver's -------------------------------------------------------------------------------------------------

/// The default stream begins with its first use. The lock is held.
FakeCuda::Worker* FakeCuda::worker_of(CuStream stream) {
    if (stream == nullptr && !streams_.contains(stream)) {
        streams_.emplace(stream, std::make_unique<Worker>(*this, options_.seed));
    }
    const auto found = streams_.find(stream);
    return found == streams_.end() ? nullptr : found->second.get();
}

/// The lock is held.
void FakeCuda::lose(CuResult result) {
    lost_by_ = result;
    changed_.notify_all();
}

/// Who uses memory too early is told, and waits, so that what follows is not undefined.
void FakeCuda::wait_for_uses(Lock& lock, std::span<const std::byte> memory, const char* what) {
    const auto is_used = [&] {
        return lost_by_ == CuResult::success &&
               std::ranges::any_of(uses_, [&](const auto& use) { return overlap(memory, use.first, use.second); });
    };
    EXPECT_FALSE(is_used()) << what;
    changed_.wait(lock, [&] { return !is_used(); });
}

CuResult FakeCuda::enqueue(CuStream stream, const std::vector<std::span<const std::byte>>& memory,
                           std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    Worker* const worker = worker_of(stream);
    if (!worker) return CuResult::invalid_handle;
    if (captures_.contains(stream)) return CuResult::success;
    if (stream == nullptr && invalidate_capture_of(stream)) return CuResult::capture_implicit;
    for (const auto& part : memory) uses_.emplace(part.data(), part.size());
    worker->push([this, memory, work = std::move(work)] {
        bool is_lost = false;
        {
            const std::lock_guard inner(mutex_);
            is_lost = lost_by_ != CuResult::success;
        }
        if (!is_lost) work();
        finish(memory);
    });
    return CuResult::success;
}

void FakeCuda::finish(const std::vector<std::span<const std::byte>>& memory) {
    const std::lock_guard lock(mutex_);
    for (const auto& part : memory) {
        const auto [begin, end] = uses_.equal_range(part.data());
        uses_.erase(std::find_if(begin, end, [&](const auto& use) { return use.second == part.size(); }));
    }
    changed_.notify_all();
}

void FakeCuda::carry_out_copy(std::span<std::byte> to, std::span<const std::byte> from) {
    {
        const std::lock_guard lock(mutex_);
        if (copies_++ == failing_copy_) {
            lose(copy_failure_);
            return;
        }
    }
    std::ranges::copy(from, to.begin());
}

/// Like the driver's: from and to host memory that is not registered it has happened when the call returns.
CuResult FakeCuda::copy(CuStream stream, std::span<std::byte> to, std::span<const std::byte> from,
                        std::span<const std::byte> on_device, bool is_asynchronous) {
    if (context_depth_ == 0) return CuResult::invalid_context;
    {
        const std::lock_guard lock(mutex_);
        if (!covers(on_device, true)) {
            ADD_FAILURE() << "a copy where the device has no memory";
            lose(CuResult::illegal_address);
            return CuResult::illegal_address;
        }
    }
    const CuResult queued = enqueue(stream, {to, from}, [this, to, from] { carry_out_copy(to, from); });
    return queued != CuResult::success || is_asynchronous ? queued : wait_for(stream);
}

CuResult FakeCuda::cuMemcpyHtoDAsync_v2(CuAddress to, const void* from, std::size_t size_bytes, CuStream stream) {
    const std::span<std::byte> there(pointer_to(to), size_bytes);
    const std::span<const std::byte> here(static_cast<const std::byte*>(from), size_bytes);
    return copy(stream, there, here, there, is_registered(here));
}

CuResult FakeCuda::cuMemcpyDtoHAsync_v2(void* to, CuAddress from, std::size_t size_bytes, CuStream stream) {
    const std::span<std::byte> here(static_cast<std::byte*>(to), size_bytes);
    const std::span<const std::byte> there(pointer_to(from), size_bytes);
    return copy(stream, here, there, there, is_registered(here));
}

CuResult FakeCuda::cuMemsetD8Async(CuAddress address, unsigned char value, std::size_t count, CuStream stream) {
    if (context_depth_ == 0) return CuResult::invalid_context;
    if (!is_mapped({pointer_to(address), count})) return CuResult::invalid_value;
    return enqueue(stream, {{pointer_to(address), count}},
                   [address, value, count] { std::memset(pointer_to(address), value, count); });
}

CuResult FakeCuda::cuStreamCreateWithPriority(CuStream* stream, unsigned flags, int) {
    EXPECT_EQ(flags, kCuStreamNonBlocking) << "a stream that waits for the framework's";
    const std::lock_guard lock(mutex_);
    if (context_depth_ == 0) return CuResult::invalid_context;
    *stream = reinterpret_cast<CuStream>(next_id_++);
    streams_.emplace(*stream, std::make_unique<Worker>(*this, options_.seed + next_id_));
    return CuResult::success;
}

CuResult FakeCuda::cuStreamDestroy_v2(CuStream stream) {
    std::unique_ptr<Worker> worker;  // ends without the lock
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return CuResult::invalid_handle;
    EXPECT_TRUE(found->second->has_begun_all()) << "a stream is destroyed with work in it";
    worker = std::move(found->second);
    streams_.erase(found);
    return CuResult::success;
}

CuResult FakeCuda::wait_for(CuStream stream) {
    Lock lock(mutex_);
    const Worker* const worker = worker_of(stream);
    if (!worker) return CuResult::invalid_handle;
    if (invalidate_capture_of(stream)) {
        return stream ? CuResult::capture_unsupported : CuResult::capture_implicit;
    }
    changed_.wait(lock, [&] { return lost_by_ != CuResult::success || worker->is_idle(); });
    return lost_by_;
}

CuResult FakeCuda::cuStreamSynchronize(CuStream stream) { return wait_for(stream); }

/// What the stream is given later begins once the event has passed as it was recorded last.
CuResult FakeCuda::cuStreamWaitEvent(CuStream stream, CuEvent event, unsigned flags) {
    if (context_depth_ == 0) return CuResult::invalid_context;
    EXPECT_EQ(flags, 0u);
    std::uint64_t number = 0;
    {
        const std::lock_guard lock(mutex_);
        const auto found = events_.find(event);
        if (found == events_.end()) return CuResult::invalid_handle;
        if (found->second.captured_in) return refuse_captured(found->second);
        number = found->second.recorded;
    }
    return enqueue(stream, {}, [this, event, number] {
        Lock lock(mutex_);
        changed_.wait(lock, [&] {
            const auto found = events_.find(event);
            return lost_by_ != CuResult::success || found == events_.end() || found->second.passed >= number;
        });
    });
}

CuResult FakeCuda::cuEventCreate(CuEvent* event, unsigned flags) {
    EXPECT_TRUE(flags & kCuEventDisableTiming);
    const std::lock_guard lock(mutex_);
    if (context_depth_ == 0) return CuResult::invalid_context;
    *event = reinterpret_cast<CuEvent>(next_id_++);
    events_.emplace(*event, EventState{});
    return CuResult::success;
}

CuResult FakeCuda::cuEventDestroy_v2(CuEvent event) {
    const std::lock_guard lock(mutex_);
    return events_.erase(event) == 1 ? CuResult::success : CuResult::invalid_handle;
}

CuResult FakeCuda::cuEventRecord(CuEvent event, CuStream stream) {
    if (context_depth_ == 0) return CuResult::invalid_context;
    std::uint64_t number = 0;
    {
        const std::lock_guard lock(mutex_);
        const auto found = events_.find(event);
        if (found == events_.end()) return CuResult::invalid_handle;
        if (stream == nullptr && invalidate_capture_of(stream)) return CuResult::capture_implicit;
        found->second.captured_in = captures_.contains(stream) ? stream : nullptr;
        number = ++found->second.recorded;
    }
    return enqueue(stream, {}, [this, event, number] {
        const std::lock_guard lock(mutex_);
        const auto found = events_.find(event);  // may have been recorded again since, in a stream that was faster
        if (found != events_.end()) found->second.passed = std::max(found->second.passed, number);
        changed_.notify_all();
    });
}

CuResult FakeCuda::cuEventQuery(CuEvent event) {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(event);
    if (found == events_.end()) return CuResult::invalid_handle;
    if (found->second.captured_in) return refuse_captured(found->second);
    return found->second.passed >= found->second.recorded ? CuResult::success : CuResult::not_ready;
}

CuResult FakeCuda::cuEventSynchronize(CuEvent event) {
    Lock lock(mutex_);
    const auto found = events_.find(event);
    if (found == events_.end()) return CuResult::invalid_handle;
    const EventState& state = found->second;
    if (state.captured_in) return refuse_captured(state);
    changed_.wait(lock, [&] { return lost_by_ != CuResult::success || state.passed >= state.recorded; });
    return lost_by_;
}

}  // namespace torch_offload::test
