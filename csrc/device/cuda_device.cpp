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
    return std::make_unique<CudaStream>(context_, events_, direction, options_.buffer_bytes, options_.host);
}

/// On a lost device nothing runs: what was used is free, and the next call says why. Memory that is let go too early
/// would be silently wrong: where there is no event now, there will be. A stream that is captured is not waited for,
/// which would break the capture.
std::shared_ptr<const Event> CudaDevice::fence_use() noexcept {
    if (!options_.current_stream || context_.is_lost()) return nullptr;
    const CuStream stream = options_.current_stream();
    try {
        return events_->record(stream);
    } catch (const InvalidArgument& error) {
        OFFLOAD_LOG(debug, "kernels are marked later: ", error.what());
        return events_->record_later(stream);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(warning, "no event for kernels, waiting for them: ", error.what());
    }
    return events_->wait_for(stream) ? nullptr : events_->record_later(stream);
}

void CudaDevice::order_after(const Event& fence) const {
    if (options_.current_stream) {
        events_->order(options_.current_stream(), fence);
    } else {
        fence.wait();
    }
}

void CudaDevice::check_use() const {
    if (!options_.current_stream) return;
    const CudaContext::Scope scope(context_);
    context_.check_not_captured(options_.current_stream());
}

}  // namespace torch_offload
