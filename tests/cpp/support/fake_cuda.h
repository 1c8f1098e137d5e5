// A CUDA driver on host memory that is stricter than the real one: what it would forgive or punish later is a test
// failure at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/units.h"
#include "device/cuda_abi.h"

namespace torch_offload::test {

struct FakeCudaOptions {
    std::size_t granule_bytes = 2 * kSectorBytes;
    std::size_t memory_bytes = 64 * kMiB;        // of the device
    std::chrono::microseconds longest_delay{0};  // before each thing in a stream, drawn from the seed
    std::uint64_t seed = 0;
    int version = 12040;
    int device_count = 1;
    bool has_virtual_memory = true;
    bool may_register = true;
};

inline std::byte* pointer_to(CuAddress address) { return reinterpret_cast<std::byte*>(address); }

/// Memory of the device is readable by the host, so that tests can look; streams are threads. Reports what is left
/// behind when it ends, unless the device was lost. One at a time: the driver's functions have no object.
/// Threads: any.
class FakeCuda {
public:
    explicit FakeCuda(const FakeCudaOptions& options = {});
    ~FakeCuda();
    FakeCuda(const FakeCuda&) = delete;
    FakeCuda& operator=(const FakeCuda&) = delete;

    static CudaFunctions functions();
    static FakeCuda* current() { return current_; }

    /// The call of `symbol` after `skip` more returns `result` and does nothing.
    void fail(const std::string& symbol, CuResult result, std::size_t skip = 0);
    /// The same, and every call after it does so too.
    void lose_at(const std::string& symbol, CuResult result, std::size_t skip = 0);
    /// Nothing that was asked to fail does so any more.
    void forgive();
    /// The copy after `skip` more fails in its stream: the device is lost.
    void fail_copy(CuResult result, std::size_t skip = 0);

    /// Nothing in streams begins from now on, until let_go().
    void hold();
    void let_go();

    /// Streams say from now on whether they are captured into a graph.
    void set_capturing(bool is_capturing) { is_capturing_ = is_capturing; }
    /// The calling thread captures into a graph what `stream` is given from now on: nothing of it runs.
    void begin_capture(CuStream stream, CuCaptureMode mode = CuCaptureMode::global);
    /// False if something that a graph cannot note down has invalidated it.
    bool end_capture(CuStream stream);
    /// Of the calling thread.
    static CuCaptureMode capture_mode() { return capture_mode_; }
    static void set_capture_mode(CuCaptureMode mode) { capture_mode_ = mode; }

    /// A stream for kernels, and a kernel that uses `memory` of the device.
    CuStream compute_stream();
    /// One of another library's: it and the default stream (nullptr) wait for each other.
    CuStream blocking_stream();
    void launch(const std::vector<std::span<std::byte>>& memory, std::function<void()> kernel);
    void launch_in(CuStream stream, const std::vector<std::span<std::byte>>& memory, std::function<void()> kernel);

    std::size_t call_count(const std::string& symbol) const;
    std::size_t created_bytes() const;       // of physical memory, now
    std::size_t peak_created_bytes() const;  // and at most
    bool is_mapped(std::span<const std::byte> memory) const;
    bool is_registered(std::span<const std::byte> memory) const;

    /// The driver's functions.
#define OFFLOAD_DECLARE(symbol, parameters) CuResult symbol parameters;
    OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_DECLARE)
#undef OFFLOAD_DECLARE

    /// What a call of `symbol` begins with: an error that was asked for, or the lost device's.
    CuResult begin_call(const std::string& symbol);

private:
    class Worker;
    static FakeCuda* current_;
    static thread_local int context_depth_;
    static thread_local CuCaptureMode capture_mode_;
    struct Physical {
        int file = -1;
        std::size_t size_bytes = 0;
    };
    struct Mapping {
        CuMemory memory = 0;
        std::size_t size_bytes = 0;
        bool is_accessible = false;
    };
    struct EventState {
        std::uint64_t recorded = 0;
        std::uint64_t passed = 0;
        CuStream captured_in = nullptr;  // it is a graph's, not a stream's
    };
    struct Capture {
        CuCaptureMode mode = CuCaptureMode::global;
        std::thread::id thread;
        bool is_valid = true;
    };
    using Lock = std::unique_lock<std::mutex>;

    bool covers(std::span<const std::byte> memory, bool is_accessible) const;
    bool covers_registered(std::span<const std::byte> memory) const;
    void wait_for_uses(Lock& lock, std::span<const std::byte> memory, const char* what);
    CuResult copy(CuStream stream, std::span<std::byte> to, std::span<const std::byte> from,
                  std::span<const std::byte> on_device, bool is_asynchronous);
    void carry_out_copy(std::span<std::byte> to, std::span<const std::byte> from);
    CuResult enqueue(CuStream stream, const std::vector<std::span<const std::byte>>& memory,
                     std::function<void()> work);
    bool invalidate_captures_that_forbid(const std::string& symbol);
    bool invalidate_capture_of(CuStream stream);
    CuResult refuse_captured(const EventState& event);
    Worker* worker_of(CuStream stream);
    void finish(const std::vector<std::span<const std::byte>>& memory);
    CuResult wait_for(CuStream stream);
    void lose(CuResult result);
    void report_what_is_left();

    const FakeCudaOptions options_;
    std::atomic<bool> is_capturing_{false};
    mutable std::mutex mutex_;  // guards what follows; not held while something in a stream runs
    std::condition_variable changed_;
    std::map<std::string, std::size_t> calls_;
    struct Failure {
        std::size_t at_call = 0;
        CuResult result = CuResult::success;
        bool loses_device = false;
    };
    std::multimap<std::string, Failure> failures_;  // by symbol
    std::size_t copies_ = 0;
    std::size_t failing_copy_ = SIZE_MAX;
    CuResult copy_failure_ = CuResult::success;
    CuResult lost_by_ = CuResult::success;
    int retained_ = 0;
    std::uint64_t next_id_ = 1;
    std::map<CuAddress, std::size_t> reserved_;
    std::map<CuMemory, Physical> created_;
    std::map<CuAddress, Mapping> mapped_;
    std::size_t created_bytes_ = 0;
    std::size_t peak_created_bytes_ = 0;
    std::map<const std::byte*, std::size_t> registered_;
    std::multimap<const std::byte*, std::size_t> uses_;  // memory of what is in streams
    std::map<CuEvent, EventState> events_;
    std::map<CuStream, std::unique_ptr<Worker>> streams_;
    CuStream compute_stream_ = nullptr;
    std::set<CuStream> blocking_;
    std::map<CuStream, Capture> captures_;  // by the stream that is captured
    bool is_held_ = false;
};

}  // namespace torch_offload::test
