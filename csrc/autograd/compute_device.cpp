#include "autograd/compute_device.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

#include "autograd/kernel_scope.h"
#include "base/check.h"
#include "device/cuda_device.h"
#include "device/cuda_driver.h"
#include "device/cuda_memory.h"
#include "device/locked_memory.h"

namespace torch_offload {
namespace {

/// Memory of the host that is handed out like a device's: tensors stay on the CPU.
class EmulatedComputeDevice final : public ComputeDevice {
public:
    explicit EmulatedComputeDevice(const EmulatedDeviceOptions& options) : device_(options) {}
    c10::Device torch_device() const noexcept override { return c10::kCPU; }
    Device& device() noexcept override { return device_; }
    Memory* memory() noexcept override { return nullptr; }
    Memory* host_memory() noexcept override { return nullptr; }

private:
    EmulatedDevice device_;
};

/// A GPU that torch computes on as well: the same context, the kernels of torch's streams.
class CudaComputeDevice final : public ComputeDevice {
public:
    explicit CudaComputeDevice(int ordinal)
        : torch_device_(c10::kCUDA, static_cast<c10::DeviceIndex>(ordinal)),
          context_(CudaDriver::load(), ordinal),
          memory_(context_),
          host_memory_(context_),
          device_(context_,
                  {.current_stream =
                       [torch_device = torch_device_] {
                           return static_cast<CuStream>(torch_offload::current_stream(torch_device)->native_handle());
                       },
                   .host = &host_memory_}) {}
    c10::Device torch_device() const noexcept override { return torch_device_; }
    Device& device() noexcept override { return device_; }
    Memory* memory() noexcept override { return &memory_; }
    Memory* host_memory() noexcept override { return &host_memory_; }

private:
    const c10::Device torch_device_;
    CudaContext context_;
    CudaMemory memory_;
    LockedMemory host_memory_;
    CudaDevice device_;
};

}  // namespace

std::unique_ptr<ComputeDevice> ComputeDevice::open(const DeviceTier& tier) {
    if (tier.kind == DeviceKind::emulated) return std::make_unique<EmulatedComputeDevice>(tier.emulated);
    OFFLOAD_CHECK(c10::impl::hasDeviceGuardImpl(c10::kCUDA), InvalidArgument,
                  "this torch was built without CUDA and cannot compute on a GPU; install one that was");
    return std::make_unique<CudaComputeDevice>(tier.ordinal);
}

std::optional<c10::Stream> current_stream(c10::Device torch_device) {
    if (torch_device.is_cpu()) return std::nullopt;
    return c10::impl::VirtualGuardImpl(torch_device.type()).getStream(torch_device);
}

/// The device is given: otherwise torch would ask the driver about an address that it does not know.
at::Tensor tensor_over(std::span<const std::byte> bytes, c10::ScalarType dtype, c10::Device torch_device) {
    const auto length = static_cast<std::int64_t>(bytes.size() / c10::elementSize(dtype));
    return at::for_blob(const_cast<std::byte*>(bytes.data()), {length})
        .options(at::TensorOptions().dtype(dtype).device(torch_device))
        .target_device(torch_device)
        .make_tensor();
}

void copy_bytes(std::span<std::byte> target, c10::Device target_place, std::span<const std::byte> source,
                c10::Device source_place) {
    if (target_place.is_cpu() && source_place.is_cpu()) {
        std::memcpy(target.data(), source.data(), target.size());
        return;
    }
    const KernelScope scope(FloatEnvironment::current(), KernelThreads::all);
    tensor_over(target, c10::kByte, target_place).copy_(tensor_over(source, c10::kByte, source_place));
}

}  // namespace torch_offload
