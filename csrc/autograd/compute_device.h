// Where the module's tensors are, and the engine's device behind torch's. Layer autograd: the only file of it that
// names a kind of device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "device/emulated_device.h"
#include "device/memory.h"
#include "device/stream.h"

namespace torch_offload {

enum class DeviceKind : std::uint8_t { emulated, cuda };

/// A device of which the module is to use only the memory, the host's being below it.
struct DeviceTier {
    DeviceKind kind = DeviceKind::emulated;
    std::size_t budget_bytes = 0;
    bool updates_on_host = false;           // of parameters, by the optimizer
    bool activations_stay_on_host = false;  // those that left the device
    EmulatedDeviceOptions emulated;
    int ordinal = 0;  // of a GPU
};

/// One device of a kind, opened. Threads: any.
class ComputeDevice {
public:
    /// Throws: InvalidArgument if there is no such device, no driver for it, or one that is too old.
    static std::unique_ptr<ComputeDevice> open(const DeviceTier& tier);
    ComputeDevice() = default;
    ComputeDevice(const ComputeDevice&) = delete;
    ComputeDevice& operator=(const ComputeDevice&) = delete;
    virtual ~ComputeDevice() = default;

    /// What tensors on it say that they are on: the CPU, where the device is only emulated.
    virtual c10::Device torch_device() const noexcept = 0;
    virtual Device& device() noexcept = 0;
    /// Where frames come from, here and in the tier below; nullptr: the process's memory.
    virtual Memory* memory() noexcept = 0;
    virtual Memory* host_memory() noexcept = 0;
};

/// The stream that takes the calling thread's kernels on `torch_device`; nothing where kernels have run when they
/// return.
std::optional<c10::Stream> current_stream(c10::Device torch_device);

/// A flat tensor over whole elements that somebody else owns.
at::Tensor tensor_over(std::span<const std::byte> bytes, c10::ScalarType dtype, c10::Device torch_device);

/// Copies bytes between two devices, of which either may be the host. The host's bytes may change, or are there, once
/// it returns; a device's are in the order of the calling thread's stream. Pre: equally long. Throws: c10::Error if the
/// device is lost.
void copy_bytes(std::span<std::byte> target, c10::Device target_place, std::span<const std::byte> source,
                c10::Device source_place);

}  // namespace torch_offload
