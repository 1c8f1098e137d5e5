#include "device/cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/log.h"

namespace torch_offload {
namespace {

constexpr int kOldestVersion = 12000;  // of the driver's interface: CUDA 12.0
constexpr const char* kDriverRemedy = "install an NVIDIA driver for CUDA 12.0 or newer, or use device=\"host\"";

/// After these the driver refuses every call: it leaves "the process in an inconsistent state", or the context is gone.
constexpr std::array kLosingResults = {
    CuResult::deinitialized,        CuResult::ecc_uncorrectable,
    CuResult::nvlink_uncorrectable, CuResult::contained,
    CuResult::illegal_address,      CuResult::launch_timeout,
    CuResult::context_is_destroyed, CuResult::assertion,
    CuResult::hardware_stack_error, CuResult::illegal_instruction,
    CuResult::misaligned_address,   CuResult::invalid_address_space,
    CuResult::invalid_pc,           CuResult::launch_failed,
    CuResult::tensor_memory_leak,   CuResult::external_device,
};
/// The same, or one call's: the next call tells.
constexpr std::array kUnclearResults = {CuResult::device_unavailable, CuResult::unknown};

bool loses_device(CuResult result) { return std::ranges::count(kLosingResults, result) != 0; }
bool is_unclear(CuResult result) { return std::ranges::count(kUnclearResults, result) != 0; }

const char* remedy_of_beginning(CuResult result) {
    if (result == CuResult::system_not_ready) {
        return "; where GPUs are joined by NVSwitch (HGX, DGX) their fabric manager has to run, of the driver's own "
               "version: systemctl start nvidia-fabricmanager, on the host of a container or virtual machine; or use "
               "device=\"host\"";
    }
    return "; check nvidia-smi, and that the process may use the device, or use device=\"host\"";
}

template <typename Function>
void find_symbol(void* library, const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, symbol));
    OFFLOAD_CHECK(function, InvalidArgument, "the CUDA driver has no function ", symbol, ": it is too old; ",
                  kDriverRemedy);
}

}  // namespace

// --- The driver ---------------------------------------------------------------------------------------------------

/// Never closed: the driver has threads of its own.
CudaDriver CudaDriver::load(const char* library_name) {
    void* const library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char* const error = dlerror();
        throw InvalidArgument(concat("no CUDA driver: ", error ? error : library_name, "; ", kDriverRemedy));
    }
    CudaFunctions functions;
#define OFFLOAD_FIND(symbol, parameters) find_symbol(library, #symbol, functions.symbol);
    OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_FIND)
#undef OFFLOAD_FIND
    return CudaDriver(functions);
}

CudaDriver::CudaDriver(const CudaFunctions& functions) : functions_(functions) {
    const CuResult begun = functions_.cuInit(0);
    OFFLOAD_CHECK(begun == CuResult::success, InvalidArgument, "the CUDA driver does not begin: ", text_of(begun),
                  remedy_of_beginning(begun));
    int version = 0;
    const CuResult asked = functions_.cuDriverGetVersion(&version);
    OFFLOAD_CHECK(asked == CuResult::success, InvalidArgument, "the CUDA driver's version: ", text_of(asked));
    OFFLOAD_CHECK(version >= kOldestVersion, InvalidArgument, "the CUDA driver is of version ", version / 1000, ".",
                  version % 1000 / 10, "; ", kDriverRemedy);
}

std::string CudaDriver::text_of(CuResult result) const {
    const char* name = nullptr;
    const char* text = nullptr;
    const bool is_known = functions_.cuGetErrorName(result, &name) == CuResult::success &&
                          functions_.cuGetErrorString(result, &text) == CuResult::success && name && text;
    return is_known ? concat(name, " (", text, ")") : concat("CUDA error ", static_cast<int>(result));
}

// --- The context --------------------------------------------------------------------------------------------------

CudaContext::CudaContext(const CudaDriver& driver, int ordinal)
    : driver_(driver), ordinal_(ordinal), name_(concat("cuda:", ordinal)) {
    int count = 0;
    const CuResult counted = functions().cuDeviceGetCount(&count);
    OFFLOAD_CHECK(counted == CuResult::success, InvalidArgument, "counting CUDA devices: ", text_of(counted));
    OFFLOAD_CHECK(0 <= ordinal && ordinal < count, InvalidArgument, "no device ", name_, ": there are ", count,
                  "; check CUDA_VISIBLE_DEVICES, or use device=\"host\"");
    OFFLOAD_CUDA(*this, cuDeviceGet, &device_, ordinal);
    std::array<char, 256> model{};
    OFFLOAD_CUDA(*this, cuDeviceGetName, model.data(), static_cast<int>(model.size() - 1), device_);
    name_ = concat(name_, " ", model.data());
    int has_virtual_memory = 0;
    OFFLOAD_CUDA(*this, cuDeviceGetAttribute, &has_virtual_memory, kCuAttributeVirtualMemory, device_);
    OFFLOAD_CHECK(has_virtual_memory != 0, InvalidArgument, name_,
                  " cannot map memory at addresses of the program's choice; use device=\"host\"");
    const CuResult retained = functions().cuDevicePrimaryCtxRetain(&context_, device_);
    OFFLOAD_CHECK(retained != CuResult::device_unavailable, InvalidArgument, name_, ": ", text_of(retained),
                  "; another process has it for itself, or its compute mode admits none: nvidia-smi -q -d COMPUTE");
    check(retained, "cuDevicePrimaryCtxRetain");
}

CudaContext::~CudaContext() {
    const CuResult released = functions().cuDevicePrimaryCtxRelease_v2(device_);
    if (released != CuResult::success && !is_lost()) {
        OFFLOAD_LOG(error, name_, ": giving up the context: ", text_of(released));
    }
}

CudaContext::Scope::Scope(const CudaContext& context) : context_(context) {
    if (context.is_lost()) context.raise_lost("a call");
    context.check(context.enter(former_mode_), "entering the context");
}

CudaContext::Scope::~Scope() {
    const CuResult result = context_.leave(former_mode_);
    if (result == CuResult::success || context_.is_lost()) return;
    OFFLOAD_LOG(error, context_.name(), ": leaving the context: ", context_.text_of(result));
}

/// Nothing is left to be left if it fails.
CuResult CudaContext::enter(CuCaptureMode& former_mode) const noexcept {
    if (const CuResult pushed = functions().cuCtxPushCurrent_v2(context_); pushed != CuResult::success) return pushed;
    former_mode = CuCaptureMode::relaxed;
    const CuResult exchanged = functions().cuThreadExchangeStreamCaptureMode(&former_mode);
    CuContext popped = nullptr;
    if (exchanged != CuResult::success) functions().cuCtxPopCurrent_v2(&popped);
    return exchanged;
}

CuResult CudaContext::leave(CuCaptureMode former_mode) const noexcept {
    const CuResult exchanged = functions().cuThreadExchangeStreamCaptureMode(&former_mode);
    CuContext popped = nullptr;
    const CuResult left = functions().cuCtxPopCurrent_v2(&popped);
    return exchanged == CuResult::success ? left : exchanged;
}

bool CudaContext::register_host(std::span<std::byte> memory) const {
    const Scope scope(*this);
    const CuResult result = functions().cuMemHostRegister_v2(memory.data(), memory.size(), kCuHostRegisterPortable);
    if (result == CuResult::success) return true;
    if (ends_device(result)) check(result, "cuMemHostRegister_v2");
    if (!was_refusal_logged_.exchange(true)) {
        OFFLOAD_LOG(
            warning, name_, ": ", memory.size(), " bytes of host memory cannot be registered: ", text_of(result),
            "; copies are slower. Host memory is short, or this container or virtual machine limits what may be "
            "page-locked: free memory, or give it more");
    }
    return false;
}

void CudaContext::unregister_host(std::span<std::byte> memory) const {
    const Scope scope(*this);
    OFFLOAD_CUDA(*this, cuMemHostUnregister, memory.data());
}

void CudaContext::check(CuResult result, const char* call) const {
    if (result == CuResult::success) return;
    if (ends_device(result)) lose(result, call);
    if (is_lost()) raise_lost(call);
    const std::string message = concat(name_, ": ", call, ": ", text_of(result));
    OFFLOAD_CHECK(
        !is_of_capture(result), InvalidArgument, message,
        "; a capture into a CUDA graph is under way and forbids it: end the capture first, and use the wrapped "
        "module outside of it");
    OFFLOAD_CHECK(result != CuResult::out_of_memory, OutOfTierMemory, message,
                  "; the device's memory is used by somebody else: lower `gpu`, or what the framework and other "
                  "processes take");
    throw LogicError(message);
}

/// The driver's documentation of cuStreamIsCapturing: while a stream that waits for the default stream is captured, the
/// answer about the default stream is STREAM_CAPTURE_IMPLICIT, and until that capture ends the default stream is
/// unusable. Asking does not invalidate the capture; recording an event there, or a kernel, would, and fail itself. So
/// it is not "not captured".
void CudaContext::check_not_captured(CuStream stream) const {
    int status = kCuCaptureNone;
    const CuResult asked = functions().cuStreamIsCapturing(stream, &status);
    OFFLOAD_CHECK(asked != CuResult::capture_implicit, InvalidArgument, name_,
                  ": the default stream cannot be used while a stream that waits for it is captured into a CUDA graph; "
                  "end the capture first, or capture on a stream that does not (torch.cuda.Stream)");
    check(asked, "cuStreamIsCapturing");
    OFFLOAD_CHECK(status == kCuCaptureNone, InvalidArgument,
                  "a CUDA graph cannot be captured over memory that is paged: replayed, it would use addresses whose "
                  "memory has left; end the capture, and capture what does not touch the wrapped module, or unwrap it "
                  "first");
}

/// What is unclear is asked about again, by a call that fails on a lost device as others do and needs nothing.
bool CudaContext::ends_device(CuResult result) const noexcept {
    if (!is_unclear(result) || !context_) return loses_device(result);
    CuCaptureMode former_mode = CuCaptureMode::relaxed;
    CuResult again = enter(former_mode);
    if (again == CuResult::success) {
        int lowest = 0;
        int highest = 0;
        again = functions().cuCtxGetStreamPriorityRange(&lowest, &highest);
        leave(former_mode);
    }
    return loses_device(again) || is_unclear(again);
}

/// The first error is the one that says what happened.
void CudaContext::lose(CuResult by, const char* call) const {
    CuResult expected = CuResult::success;
    if (!lost_by_.compare_exchange_strong(expected, by, std::memory_order_acq_rel)) return;
    OFFLOAD_LOG(error, name_, " is lost: ", call, ": ", text_of(by));
}

void CudaContext::raise_lost(const char* call) const {
    throw TierIoError(concat(name_, " is lost, ", call, " cannot be served: ", text_of(lost_by_.load()),
                             "; the process cannot use the device any more, restart it from the last checkpoint"),
                      0);
}

}  // namespace torch_offload
