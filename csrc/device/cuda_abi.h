// What is used of the CUDA driver's binary interface, written down here so that the library builds where there are no
// CUDA headers. cuda_abi_check.cpp holds it against <cuda.h>. Layer device: includes nothing of this project.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_offload {

using CuDevice = int;
using CuAddress = unsigned long long;  // in the device's memory
using CuMemory = unsigned long long;   // physical memory
using CuContext = struct CuContextTag*;
using CuStream = struct CuStreamTag*;
using CuEvent = struct CuEventTag*;

/// The results that are told apart. The driver has more, and newer ones have more still.
enum class CuResult : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    deinitialized = 4,
    device_unavailable = 46,
    no_device = 100,
    invalid_device = 101,
    invalid_context = 201,
    map_failed = 205,
    already_mapped = 208,
    not_mapped = 211,
    ecc_uncorrectable = 214,
    nvlink_uncorrectable = 220,
    contained = 226,
    invalid_handle = 400,
    not_ready = 600,
    illegal_address = 700,
    launch_timeout = 702,
    context_is_destroyed = 709,
    assertion = 710,
    memory_already_registered = 712,
    memory_not_registered = 713,
    hardware_stack_error = 714,
    illegal_instruction = 715,
    misaligned_address = 716,
    invalid_address_space = 717,
    invalid_pc = 718,
    launch_failed = 719,
    tensor_memory_leak = 721,
    not_permitted = 800,
    not_supported = 801,
    system_not_ready = 802,
    capture_unsupported = 900,  // to 908: what captures into graphs refuse
    capture_implicit = 906,
    captured_event = 907,
    capture_wrong_thread = 908,
    external_device = 911,
    unknown = 999,
};

inline constexpr int kCuAttributeVirtualMemory = 102;  // of a device: the calls on physical memory work
inline constexpr int kCuGranularityMinimum = 0;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr int kCuCaptureNone = 0;  // of a stream: it runs what it is given
inline constexpr int kCuCaptureActive = 1;
inline constexpr int kCuCaptureInvalidated = 2;
inline constexpr unsigned kCuEventBlockingSync = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr unsigned kCuHostRegisterPortable = 1;

/// Of a capture: which threads may not do meanwhile what a graph cannot note down, all or the one that captures. Of a
/// thread: whose captures it heeds, those of all threads, its own, or nobody's.
enum class CuCaptureMode : int { global = 0, of_thread = 1, relaxed = 2 };

enum class CuLocationType : int { device = 1 };
enum class CuAllocationType : int { pinned = 1 };
enum class CuAccess : int { none = 0, read_write = 3 };

struct CuLocation {
    CuLocationType type = CuLocationType::device;
    int id = 0;
};

struct CuAllocationProperties {
    CuAllocationType type = CuAllocationType::pinned;
    int handle_types = 0;  // none: not for other processes
    CuLocation location;
    void* windows_meta_data = nullptr;
    struct {
        unsigned char compression = 0;
        unsigned char direct_rdma = 0;
        unsigned short usage = 0;
        unsigned char reserved[4] = {};
    } flags;
};

struct CuAccessDescription {
    CuLocation location;
    CuAccess access = CuAccess::read_write;
};

/// Every function that is used, X(symbol, parameters). Symbols with a version mean that version for ever, and those
/// without have none.
#define OFFLOAD_CUDA_FUNCTIONS(X)                                                                                      \
    X(cuInit, (unsigned flags))                                                                                        \
    X(cuDriverGetVersion, (int* version))                                                                              \
    X(cuGetErrorName, (CuResult result, const char** name))                                                            \
    X(cuGetErrorString, (CuResult result, const char** text))                                                          \
    X(cuDeviceGetCount, (int* count))                                                                                  \
    X(cuDeviceGet, (CuDevice * device, int ordinal))                                                                   \
    X(cuDeviceGetName, (char* name, int size_bytes, CuDevice device))                                                  \
    X(cuDeviceGetAttribute, (int* value, int attribute, CuDevice device))                                              \
    X(cuDevicePrimaryCtxRetain, (CuContext * context, CuDevice device))                                                \
    X(cuDevicePrimaryCtxRelease_v2, (CuDevice device))                                                                 \
    X(cuCtxPushCurrent_v2, (CuContext context))                                                                        \
    X(cuCtxPopCurrent_v2, (CuContext * context))                                                                       \
    X(cuCtxGetStreamPriorityRange, (int* lowest, int* highest))                                                        \
    X(cuMemGetAllocationGranularity,                                                                                   \
      (std::size_t* granule_bytes, const CuAllocationProperties* properties, int which))                               \
    X(cuMemAddressReserve, (CuAddress * address, std::size_t size_bytes, std::size_t alignment_bytes,                  \
                            CuAddress wanted, unsigned long long flags))                                               \
    X(cuMemAddressFree, (CuAddress address, std::size_t size_bytes))                                                   \
    X(cuMemCreate,                                                                                                     \
      (CuMemory * memory, std::size_t size_bytes, const CuAllocationProperties* properties, unsigned long long flags)) \
    X(cuMemRelease, (CuMemory memory))                                                                                 \
    X(cuMemMap, (CuAddress address, std::size_t size_bytes, std::size_t offset_bytes, CuMemory memory,                 \
                 unsigned long long flags))                                                                            \
    X(cuMemUnmap, (CuAddress address, std::size_t size_bytes))                                                         \
    X(cuMemSetAccess,                                                                                                  \
      (CuAddress address, std::size_t size_bytes, const CuAccessDescription* descriptions, std::size_t count))         \
    X(cuMemsetD8Async, (CuAddress address, unsigned char value, std::size_t count, CuStream stream))                   \
    X(cuMemcpyHtoDAsync_v2, (CuAddress to, const void* from, std::size_t size_bytes, CuStream stream))                 \
    X(cuMemcpyDtoHAsync_v2, (void* to, CuAddress from, std::size_t size_bytes, CuStream stream))                       \
    X(cuStreamCreateWithPriority, (CuStream * stream, unsigned flags, int priority))                                   \
    X(cuStreamDestroy_v2, (CuStream stream))                                                                           \
    X(cuStreamSynchronize, (CuStream stream))                                                                          \
    X(cuStreamWaitEvent, (CuStream stream, CuEvent event, unsigned flags))                                             \
    X(cuThreadExchangeStreamCaptureMode, (CuCaptureMode * mode))                                                       \
    X(cuStreamIsCapturing, (CuStream stream, int* status))                                                             \
    X(cuEventCreate, (CuEvent * event, unsigned flags))                                                                \
    X(cuEventDestroy_v2, (CuEvent event))                                                                              \
    X(cuEventRecord, (CuEvent event, CuStream stream))                                                                 \
    X(cuEventQuery, (CuEvent event))                                                                                   \
    X(cuEventSynchronize, (CuEvent event))                                                                             \
    X(cuMemHostRegister_v2, (void* memory, std::size_t size_bytes, unsigned flags))                                    \
    X(cuMemHostUnregister, (void* memory))

/// The driver's functions, by their symbols.
struct CudaFunctions {
#define OFFLOAD_DECLARE(symbol, parameters) CuResult(*symbol) parameters = nullptr;
    OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_DECLARE)
#undef OFFLOAD_DECLARE
};

}  // namespace torch_offload
