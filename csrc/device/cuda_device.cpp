#include "device/cuda_device.h"

#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "device/cuda_stream.h"

namespace torch_offload {

CudaDevice::CudaDevice(const CudaContext& context, CudaDeviceOptions options)
    : context_(context), options_(std::move(options)), events_(CudaEventPool::make(context)) {}

CudaDevice::~CudaDevice() = default;

std::unique_ptr<Stream> CudaDevice::make_stream(LinkDirection direction) {
    return std::make_unique<CudaStream>(context_, events_, direction, options_.buffer_bytes);
}

/// On a lost device nothing runs: what was used is free, and the next call says why.
std::shared_ptr<const Event> CudaDevice::fence_use() noexcept {
    if (!options_.current_stream || context_.is_lost()) return nullptr;
    const CuStream stream = options_.current_stream();
    try {
        return events_->record(stream);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(warning, "no event for kernels, waiting for them: ", error.what());
    }
    wait_for_kernels(stream);
    return nullptr;
}

void CudaDevice::check_use() const {
    if (!options_.current_stream) return;
    const CudaContext::Scope scope(context_);
    int status = kCuCaptureNone;
    OFFLOAD_CUDA(context_, cuStreamIsCapturing, options_.current_stream(), &status);
    OFFLOAD_CHECK(status == kCuCaptureNone, InvalidArgument,
                  "a CUDA graph cannot be captured over memory that is paged: replayed, it would use addresses whose "
                  "memory has left; capture what does not touch the wrapped module, or unwrap it first");
}

/// Memory that is let go too early would be silently wrong.
void CudaDevice::wait_for_kernels(CuStream stream) noexcept {
    try {
        const CudaContext::Scope scope(context_);
        OFFLOAD_CUDA_STREAM(context_, cuStreamSynchronize, stream);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "waiting for kernels: ", error.what());
    }
}

}  // namespace torch_offload
