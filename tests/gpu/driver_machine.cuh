// What driver_program runs on: the driver and a GPU, or, in a rehearsal, the fake driver on host memory. Everything
// that differs between the two is here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "device/cuda_device.h"
#include "device/cuda_driver.h"
#include "device/cuda_memory.h"
#include "driver_report.h"

#if defined(REHEARSAL)
#include <thread>

#include "support/fake_cuda.h"
#else
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "base/launch_check.cuh"
#endif

namespace torch_offload {

using CuGraph = struct CuGraphTag*;

/// What only this program uses of the driver. Null in a rehearsal.
#define OFFLOAD_MORE_CUDA_FUNCTIONS(X)                                           \
    X(cuMemGetInfo_v2, (std::size_t* free_bytes, std::size_t* total_bytes))      \
    X(cuMemRetainAllocationHandle, (CuMemory * memory, void* address))           \
    X(cuMemAlloc_v2, (CuAddress * address, std::size_t size_bytes))              \
    X(cuMemFree_v2, (CuAddress address))                                         \
    X(cuMemcpyHtoD_v2, (CuAddress to, const void* from, std::size_t size_bytes)) \
    X(cuMemcpyDtoH_v2, (void* to, CuAddress from, std::size_t size_bytes))       \
    X(cuThreadExchangeStreamCaptureMode, (int* mode))                            \
    X(cuStreamBeginCapture_v2, (CuStream stream, int mode))                      \
    X(cuStreamEndCapture, (CuStream stream, CuGraph * graph))                    \
    X(cuGraphDestroy, (CuGraph graph))

inline constexpr int kCuCaptureModeGlobal = 0;
inline constexpr int kCuCaptureModeRelaxed = 2;

struct MoreCudaFunctions {
#define OFFLOAD_DECLARE(symbol, parameters) CuResult(*symbol) parameters = nullptr;
    OFFLOAD_MORE_CUDA_FUNCTIONS(OFFLOAD_DECLARE)
#undef OFFLOAD_DECLARE
};

inline CuAddress address_in(std::span<const std::byte> range) { return reinterpret_cast<CuAddress>(range.data()); }

#if !defined(REHEARSAL)
namespace kernels {

__device__ inline void spin(unsigned long long duration_ns) {
    unsigned long long now = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    for (const unsigned long long end = now + duration_ns; now < end;) {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    }
}

__global__ void wait_for(unsigned long long duration_ns) { spin(duration_ns); }

/// After a while, so that the host is far ahead.
__global__ void add_one(std::uint32_t* words, std::size_t count, unsigned long long delay_ns) {
    spin(delay_ns);
    const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) words[i] += 1;
}

}  // namespace kernels
#endif

/// The driver, its first device, the memory under test and a stream for kernels.
class Machine {
public:
    /// Uses::end_with_guards: the device is not told of kernels, and pages leave under them.
    enum class Uses { end_with_kernels, end_with_guards };

    explicit Machine(Uses uses = Uses::end_with_kernels)
        : driver_(make_driver()),
          context_(driver_, 0),
          memory_(std::make_unique<CudaMemory>(context_)),
          host_memory_(context_),
          compute_(make_compute_stream()),
          device_(context_, {.current_stream = uses == Uses::end_with_kernels ? [this] { return compute_; }
                                                                              : std::function<CuStream()>{},
                             .host = &host_memory_}) {
        launch_wait(std::chrono::nanoseconds(0));  // the driver loads kernels when they are first launched
        launch_add_one({}, std::chrono::nanoseconds(0));
        wait_for_kernels();
    }
    ~Machine() {
#if !defined(REHEARSAL)
        if (context_.is_lost()) return;
        const CudaContext::Scope scope(context_);
        static_cast<void>(context_.functions().cuStreamDestroy_v2(compute_));
#endif
    }
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    const CudaDriver& driver() const { return driver_; }
    const CudaContext& context() const { return context_; }
    const CudaFunctions& functions() const { return driver_.functions(); }
    const MoreCudaFunctions& more() const { return more_; }
    CudaMemory& memory() { return *memory_; }
    LockedMemory& host_memory() { return host_memory_; }
    CudaDevice& device() { return device_; }
    CuStream compute() const { return compute_; }
    std::size_t granule_bytes() const { return memory_->granularity_bytes(); }
    std::string text_of(CuResult result) const {
        return result == CuResult::success ? "success" : driver_.text_of(result);
    }
    int driver_version() const {
        int version = 0;
        static_cast<void>(functions().cuDriverGetVersion(&version));
        return version;
    }

#if defined(REHEARSAL)
    static constexpr bool kIsRehearsal = true;
    static constexpr std::size_t kDeviceBytes = 128 * kMiB;

    std::size_t free_bytes() const { return kDeviceBytes - fake_.created_bytes(); }
    bool is_mapped(std::span<const std::byte> range) const { return fake_.is_mapped(range); }
    void launch_wait(std::chrono::nanoseconds duration) {
        fake_.launch({}, [duration] { std::this_thread::sleep_for(duration); });
    }
    void launch_add_one(std::span<std::byte> range, std::chrono::nanoseconds delay) {
        const std::vector<std::span<std::byte>> used(range.empty() ? 0 : 1, range);
        fake_.launch(used, [range, delay] {
            std::this_thread::sleep_for(delay);
            auto* const words = reinterpret_cast<std::uint32_t*>(range.data());
            for (std::size_t i = 0; i < range.size() / sizeof(std::uint32_t); ++i) words[i] += 1;
        });
    }
    void capture_own_stream(bool is_capturing) { fake_.set_capturing(is_capturing); }
    /// The next wait for an event says that a kernel met an address without memory.
    void break_device(std::span<std::byte>) { fake_.lose_at("cuEventSynchronize", CuResult::illegal_address); }
#else
    static constexpr bool kIsRehearsal = false;

    std::size_t free_bytes() const {
        const CudaContext::Scope scope(context_);
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        context_.check(more_.cuMemGetInfo_v2(&free_bytes, &total_bytes), "cuMemGetInfo_v2");
        return free_bytes;
    }
    /// Whether there is memory under its first byte.
    bool is_mapped(std::span<const std::byte> range) const {
        const CudaContext::Scope scope(context_);
        CuMemory memory = 0;
        auto* const address = const_cast<std::byte*>(range.data());
        if (more_.cuMemRetainAllocationHandle(&memory, address) != CuResult::success) return false;
        context_.check(functions().cuMemRelease(memory), "cuMemRelease");
        return true;
    }
    void launch_wait(std::chrono::nanoseconds duration) {
        const CudaContext::Scope scope(context_);
        kernels::wait_for<<<1, 1, 0, stream()>>>(static_cast<unsigned long long>(duration.count()));
        check_cuda(cudaGetLastError(), "launching a kernel that waits");
    }
    void launch_add_one(std::span<std::byte> range, std::chrono::nanoseconds delay) {
        const CudaContext::Scope scope(context_);
        kernels::add_one<<<64, 256, 0, stream()>>>(reinterpret_cast<std::uint32_t*>(range.data()),
                                                   range.size() / sizeof(std::uint32_t),
                                                   static_cast<unsigned long long>(delay.count()));
        check_cuda(cudaGetLastError(), "launching a kernel that counts");
    }
    void capture_own_stream(bool is_capturing) {
        const CudaContext::Scope scope(context_);
        if (is_capturing) {
            context_.check(more_.cuStreamBeginCapture_v2(compute_, kCuCaptureModeRelaxed), "cuStreamBeginCapture_v2");
            return;
        }
        CuGraph graph = nullptr;
        context_.check(more_.cuStreamEndCapture(compute_, &graph), "cuStreamEndCapture");
        if (graph) context_.check(more_.cuGraphDestroy(graph), "cuGraphDestroy");
    }
    /// A kernel meets an address without memory.
    void break_device(std::span<std::byte> reserved) { launch_add_one(reserved, std::chrono::nanoseconds(0)); }
#endif

    void wait_for_kernels() const {
        const CudaContext::Scope scope(context_);
        context_.check(functions().cuStreamSynchronize(compute_), "cuStreamSynchronize");
    }

    /// The bytes there, brought without what is under test.
    std::vector<std::byte> read_back(std::span<const std::byte> range) const {
        std::vector<std::byte> bytes(range.size());
        const CudaContext::Scope scope(context_);
        context_.check(functions().cuMemcpyDtoHAsync_v2(bytes.data(), address_in(range), range.size(), compute_),
                       "cuMemcpyDtoHAsync_v2");
        wait_for_kernels();
        return bytes;
    }
    void write(std::span<std::byte> range, std::span<const std::byte> bytes) const {
        const CudaContext::Scope scope(context_);
        context_.check(functions().cuMemcpyHtoDAsync_v2(address_in(range), bytes.data(), range.size(), compute_),
                       "cuMemcpyHtoDAsync_v2");
        wait_for_kernels();
    }

private:
#if defined(REHEARSAL)
    CudaDriver make_driver() { return CudaDriver(test::FakeCuda::functions()); }
    CuStream make_compute_stream() { return fake_.compute_stream(); }

    test::FakeCuda fake_{{.granule_bytes = 2 * kMiB, .memory_bytes = kDeviceBytes}};
#else
    CudaDriver make_driver() {
        const CudaDriver driver = CudaDriver::load();
        void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define OFFLOAD_FIND(symbol, parameters)                                                \
    more_.symbol = reinterpret_cast<decltype(more_.symbol)>(::dlsym(library, #symbol)); \
    OFFLOAD_CHECK(more_.symbol, InvalidArgument, "the driver has no ", #symbol);
        OFFLOAD_MORE_CUDA_FUNCTIONS(OFFLOAD_FIND)
#undef OFFLOAD_FIND
        return driver;
    }
    CuStream make_compute_stream() {
        const CudaContext::Scope scope(context_);
        CuStream stream = nullptr;
        context_.check(functions().cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, 0),
                       "cuStreamCreateWithPriority");
        return stream;
    }
    cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(compute_); }
#endif
    MoreCudaFunctions more_;
    CudaDriver driver_;
    CudaContext context_;
    std::unique_ptr<CudaMemory> memory_;
    LockedMemory host_memory_;
    CuStream compute_ = nullptr;
    CudaDevice device_;
};

}  // namespace torch_offload
