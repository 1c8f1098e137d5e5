// Holds cuda_abi.h against the driver's own header, where a build has it: sizes, places, values and signatures.
#include "device/cuda_abi.h"

#if defined(TORCH_OFFLOAD_CUDA)
#include <cuda.h>

#include <type_traits>

namespace torch_offload {
namespace {

/// A parameter is passed the same way: a pointer as a pointer, a number as one of that size.
template <typename Ours, typename Theirs>
constexpr bool is_passed_alike() {
    if constexpr (std::is_pointer_v<Theirs>) return std::is_pointer_v<Ours>;
    constexpr bool are_numbers =
        (std::is_integral_v<Ours> || std::is_enum_v<Ours>) && (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
    return are_numbers && sizeof(Ours) == sizeof(Theirs);
}

template <typename OursResult, typename... Ours, typename TheirsResult, typename... Theirs>
constexpr bool are_alike(OursResult (*)(Ours...), TheirsResult (*)(Theirs...)) {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
        return false;
    } else {
        return is_passed_alike<OursResult, TheirsResult>() && (is_passed_alike<Ours, Theirs>() && ...);
    }
}

#define OFFLOAD_CHECK_SIGNATURE(symbol, parameters)                                                                  \
    static_assert(                                                                                                   \
        are_alike(static_cast<decltype(CudaFunctions::symbol)>(nullptr), static_cast<decltype(&::symbol)>(nullptr)), \
        #symbol);
OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_CHECK_SIGNATURE)
#undef OFFLOAD_CHECK_SIGNATURE

template <typename Ours, typename Theirs>
constexpr bool equals(Ours ours, Theirs theirs) {
    return static_cast<long long>(ours) == static_cast<long long>(theirs);
}

static_assert(sizeof(CuDevice) == sizeof(CUdevice));
static_assert(sizeof(CuAddress) == sizeof(CUdeviceptr));
static_assert(sizeof(CuMemory) == sizeof(CUmemGenericAllocationHandle));

static_assert(sizeof(CuLocation) == sizeof(CUmemLocation));
static_assert(offsetof(CuLocation, type) == offsetof(CUmemLocation, type));
static_assert(offsetof(CuLocation, id) == offsetof(CUmemLocation, id));

static_assert(sizeof(CuAllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(CuAllocationProperties, type) == offsetof(CUmemAllocationProp, type));
static_assert(offsetof(CuAllocationProperties, handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(CuAllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(CuAllocationProperties, windows_meta_data) ==
              offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(CuAllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(CuAllocationProperties::flags) == sizeof(CUmemAllocationProp::allocFlags));

static_assert(sizeof(CuAccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(CuAccessDescription, location) == offsetof(CUmemAccessDesc, location));
static_assert(offsetof(CuAccessDescription, access) == offsetof(CUmemAccessDesc, flags));

static_assert(equals(CuLocationType::device, CU_MEM_LOCATION_TYPE_DEVICE));
static_assert(equals(CuAllocationType::pinned, CU_MEM_ALLOCATION_TYPE_PINNED));
static_assert(equals(CuAccess::none, CU_MEM_ACCESS_FLAGS_PROT_NONE));
static_assert(equals(CuAccess::read_write, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
static_assert(equals(kCuAttributeVirtualMemory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED));
static_assert(equals(kCuGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
static_assert(equals(kCuStreamNonBlocking, CU_STREAM_NON_BLOCKING));
static_assert(equals(kCuCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE));
static_assert(equals(kCuCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE));
static_assert(equals(kCuCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED));
static_assert(sizeof(CuCaptureMode) == sizeof(CUstreamCaptureMode));
static_assert(equals(CuCaptureMode::global, CU_STREAM_CAPTURE_MODE_GLOBAL));
static_assert(equals(CuCaptureMode::of_thread, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
static_assert(equals(CuCaptureMode::relaxed, CU_STREAM_CAPTURE_MODE_RELAXED));
static_assert(equals(kCuEventBlockingSync, CU_EVENT_BLOCKING_SYNC));
static_assert(equals(kCuEventDisableTiming, CU_EVENT_DISABLE_TIMING));
static_assert(equals(kCuHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE));

static_assert(equals(CuResult::success, CUDA_SUCCESS));
static_assert(equals(CuResult::invalid_value, CUDA_ERROR_INVALID_VALUE));
static_assert(equals(CuResult::out_of_memory, CUDA_ERROR_OUT_OF_MEMORY));
static_assert(equals(CuResult::not_initialized, CUDA_ERROR_NOT_INITIALIZED));
static_assert(equals(CuResult::deinitialized, CUDA_ERROR_DEINITIALIZED));
static_assert(equals(CuResult::device_unavailable, CUDA_ERROR_DEVICE_UNAVAILABLE));
static_assert(equals(CuResult::no_device, CUDA_ERROR_NO_DEVICE));
static_assert(equals(CuResult::invalid_device, CUDA_ERROR_INVALID_DEVICE));
static_assert(equals(CuResult::invalid_context, CUDA_ERROR_INVALID_CONTEXT));
static_assert(equals(CuResult::map_failed, CUDA_ERROR_MAP_FAILED));
static_assert(equals(CuResult::already_mapped, CUDA_ERROR_ALREADY_MAPPED));
static_assert(equals(CuResult::not_mapped, CUDA_ERROR_NOT_MAPPED));
static_assert(equals(CuResult::ecc_uncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE));
static_assert(equals(CuResult::nvlink_uncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE));
#if CUDA_VERSION >= 12080
static_assert(equals(CuResult::contained, CUDA_ERROR_CONTAINED));
#endif
static_assert(equals(CuResult::invalid_handle, CUDA_ERROR_INVALID_HANDLE));
static_assert(equals(CuResult::not_ready, CUDA_ERROR_NOT_READY));
static_assert(equals(CuResult::illegal_address, CUDA_ERROR_ILLEGAL_ADDRESS));
static_assert(equals(CuResult::launch_timeout, CUDA_ERROR_LAUNCH_TIMEOUT));
static_assert(equals(CuResult::context_is_destroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED));
static_assert(equals(CuResult::assertion, CUDA_ERROR_ASSERT));
static_assert(equals(CuResult::memory_already_registered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED));
static_assert(equals(CuResult::memory_not_registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
static_assert(equals(CuResult::hardware_stack_error, CUDA_ERROR_HARDWARE_STACK_ERROR));
static_assert(equals(CuResult::illegal_instruction, CUDA_ERROR_ILLEGAL_INSTRUCTION));
static_assert(equals(CuResult::misaligned_address, CUDA_ERROR_MISALIGNED_ADDRESS));
static_assert(equals(CuResult::invalid_address_space, CUDA_ERROR_INVALID_ADDRESS_SPACE));
static_assert(equals(CuResult::invalid_pc, CUDA_ERROR_INVALID_PC));
static_assert(equals(CuResult::launch_failed, CUDA_ERROR_LAUNCH_FAILED));
#if CUDA_VERSION >= 13000
static_assert(equals(CuResult::tensor_memory_leak, CUDA_ERROR_TENSOR_MEMORY_LEAK));
#endif
static_assert(equals(CuResult::not_permitted, CUDA_ERROR_NOT_PERMITTED));
static_assert(equals(CuResult::not_supported, CUDA_ERROR_NOT_SUPPORTED));
static_assert(equals(CuResult::system_not_ready, CUDA_ERROR_SYSTEM_NOT_READY));
static_assert(equals(CuResult::capture_unsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
static_assert(equals(CuResult::capture_implicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
static_assert(equals(CuResult::captured_event, CUDA_ERROR_CAPTURED_EVENT));
static_assert(equals(CuResult::capture_wrong_thread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
static_assert(equals(CuResult::external_device, CUDA_ERROR_EXTERNAL_DEVICE));
static_assert(equals(CuResult::unknown, CUDA_ERROR_UNKNOWN));

}  // namespace
}  // namespace torch_offload
#endif
