// A GPU: side streams for pages, and marks behind kernels. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/units.h"
#include "device/cuda_event.h"
#include "device/locked_memory.h"
#include "device/stream.h"

namespace torch_offload {

struct CudaDeviceOptions {
    /// Of registered host memory, per copy under way: four for each stream, beside every budget.
    std::size_t buffer_bytes = 4 * kMiB;
    /// The stream that takes the calling thread's kernels, asked whenever a guard ends. Without one, who uses memory
    /// has waited for his kernels when he says that he is done.
    std::function<CuStream()> current_stream;
    /// Where pages of the host lie. Outlives the device.
    const LockedMemory* host = nullptr;
};

/// Errors of a stream are said by what waits for it, and every call after that: the device is lost.
/// Threads: as Device.
class CudaDevice final : public Device {
public:
    /// The context outlives the device, and the device its streams and events.
    CudaDevice(const CudaContext& context, CudaDeviceOptions options);
    ~CudaDevice() override;
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;

    std::unique_ptr<Stream> make_stream(LinkDirection direction) override;
    std::shared_ptr<const Event> fence_use() noexcept override;
    /// The stream waits, not the caller. Costs nothing where the fence is of the same stream.
    void order_after(const Event& fence) const override;
    bool has_own_cores() const noexcept override { return true; }
    /// Refuses while the stream is captured into a graph, or may not be used because another is.
    void check_use() const override;
    /// A GPU cannot tell.
    void check_idle(std::span<const std::byte>) const override {}
    /// Costs what the memory could have carried instead: left to devices that are there to find defects.
    void poison(std::span<std::byte>) noexcept override {}
    std::string name() const override { return context_.name(); }

private:
    const CudaContext& context_;
    const CudaDeviceOptions options_;
    std::shared_ptr<CudaEventPool> events_;
};

}  // namespace torch_offload
