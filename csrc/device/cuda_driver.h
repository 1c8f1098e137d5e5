// The CUDA driver, found when it is asked for, and the context that this process shares on a device. Layer device:
// includes base only.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>

#include "device/cuda_abi.h"

namespace torch_offload {

/// The driver's functions. The library is loaded at run time, so that this one works where there is no GPU.
class CudaDriver {
public:
    /// Throws: InvalidArgument if there is no driver, or it is too old.
    static CudaDriver load(const char* library = "libcuda.so.1");
    /// Over functions of the caller's. Throws: InvalidArgument if the driver is too old or refuses to begin.
    explicit CudaDriver(const CudaFunctions& functions);

    const CudaFunctions& functions() const noexcept { return functions_; }
    /// "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)"
    std::string text_of(CuResult result) const;

private:
    CudaFunctions functions_;
};

/// The primary context of one device, shared with every other library of the process, and whether the device is lost:
/// after certain errors the driver refuses every call until the process ends.
/// Threads: any.
class CudaContext {
public:
    /// Throws: InvalidArgument if there is no such device, or one whose memory cannot be mapped.
    CudaContext(const CudaDriver& driver, int ordinal);
    ~CudaContext();
    CudaContext(const CudaContext&) = delete;
    CudaContext& operator=(const CudaContext&) = delete;

    /// Calls of this thread go to the device while it lives, and heed no capture into a graph: while any thread
    /// captures in the default mode, the driver otherwise refuses everybody's questions and waits, and the capture is
    /// lost. The streams that are captured are not those that the calls are about (check_not_captured).
    class Scope {
    public:
        /// Throws: TierIoError if the device is lost.
        explicit Scope(const CudaContext& context);
        ~Scope();
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        const CudaContext& context_;
        CuCaptureMode former_mode_ = CuCaptureMode::relaxed;
    };

    const CudaFunctions& functions() const noexcept { return driver_.functions(); }
    int ordinal() const noexcept { return ordinal_; }
    /// "cuda:0 NVIDIA H200"
    const std::string& name() const noexcept { return name_; }
    std::string text_of(CuResult result) const { return driver_.text_of(result); }
    bool is_lost() const noexcept { return lost_by_.load(std::memory_order_acquire) != CuResult::success; }

    /// Lets the device copy from and to host memory without the processor. The memory must stay where it is, mremap
    /// included, until unregister_host(). False if the system refuses, which is logged once: copies use it as pageable
    /// memory then, where the driver copies once more by itself and may wait.
    bool register_host(std::span<std::byte> memory) const;
    void unregister_host(std::span<std::byte> memory) const;

    /// Throws: OutOfTierMemory, TierIoError if the device is lost, InvalidArgument if a capture into a graph forbids
    /// the call, LogicError for what else `call` says.
    void check(CuResult result, const char* call) const;
    /// Pre: inside a Scope. Throws: InvalidArgument if what the stream is given would be noted down for a graph instead
    /// of done, or refused because another is captured; else as check().
    void check_not_captured(CuStream stream) const;

private:
    CuResult enter(CuCaptureMode& former_mode) const noexcept;
    CuResult leave(CuCaptureMode former_mode) const noexcept;
    bool ends_device(CuResult result) const noexcept;
    [[noreturn]] void raise_lost(const char* call) const;
    void lose(CuResult by, const char* call) const;

    CudaDriver driver_;
    int ordinal_;
    CuDevice device_ = 0;
    CuContext context_ = nullptr;
    std::string name_;
    mutable std::atomic<CuResult> lost_by_{CuResult::success};
    mutable std::atomic<bool> was_refusal_logged_{false};
};

/// What captures into graphs refuse: an error of the call at this time, not of the device.
constexpr bool is_of_capture(CuResult result) noexcept {
    return CuResult::capture_unsupported <= result && result <= CuResult::capture_wrong_thread;
}

}  // namespace torch_offload

/// Calls a function of the driver and looks at its result.
#define OFFLOAD_CUDA(context, symbol, ...) (context).check((context).functions().symbol(__VA_ARGS__), #symbol)
