// Kernels of a GPU that is not there: operators on `cuda` tensors, computed by the host's kernels on the same memory,
// at once. With the fake driver this makes a whole GPU for a torch without CUDA.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/histc.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "fake_gpu/driver.h"

namespace torch_offload::test {
namespace {

constexpr c10::DeviceIndex kGpuCount = 2;  // pages are on the first

c10::Device gpu(c10::DeviceIndex index) { return {c10::kCUDA, index}; }
thread_local c10::DeviceIndex current_gpu = 0;

/// The one that is meant: of no number, the current one.
c10::Device meant(std::optional<c10::Device> device) {
    return gpu(device && device->has_index() ? device->index() : current_gpu);
}

// --- Device, streams, memory --------------------------------------------------------------------------------------

/// Devices with one stream each, on which everything is done at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::kCUDA; }
    c10::Device exchangeDevice(c10::Device device) const override {
        return gpu(std::exchange(current_gpu, meant(device).index()));
    }
    c10::Device getDevice() const override { return gpu(current_gpu); }
    void setDevice(c10::Device device) const override { current_gpu = meant(device).index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
    c10::Stream getStream(c10::Device device) const override { return stream(device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
    c10::Stream exchangeStream(c10::Stream other) const override { return stream(other.device()); }
    void* getStreamNativeHandle(c10::Stream) const override { return compute_stream(); }
    void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeEvent(void*) const override {}
    c10::DeviceIndex deviceCount() const noexcept override { return kGpuCount; }

private:
    static c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, meant(device)); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

/// Heap memory that says it is the current GPU's.
struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(std::size_t size_bytes) override {
        void* const memory = size_bytes == 0 ? nullptr : c10::alloc_cpu(size_bytes);
        return {memory, memory, &c10::free_cpu, gpu(current_gpu)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
    void copy_data(void* to, const void* from, std::size_t size_bytes) const override {
        default_copy_data(to, from, size_bytes);
    }
};
Allocator allocator;
[[maybe_unused]] const bool is_registered = (c10::SetAllocator(c10::kCUDA, &allocator, 255), true);

/// What torch asks before it believes that there is a GPU.
struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isPinnedPtr(const void*) const override { return false; }
    c10::Device getDeviceFromPtr(void*) const override { return gpu(0); }
    c10::DeviceIndex deviceCount() const override { return kGpuCount; }
    c10::DeviceIndex getCurrentDevice() const override { return current_gpu; }
    c10::DeviceIndex current_device() const override { return current_gpu; }
    int getNumGPUs() const override { return kGpuCount; }
    c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
    c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetDefaultCPUAllocator(); }
    void deviceSynchronize(c10::DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// --- Making tensors -----------------------------------------------------------------------------------------------

constexpr c10::DispatchKeySet kGpuKeys(c10::DispatchKey::CUDA);

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> memory_format) {
    const c10::DeviceGuard guard(meant(device));
    return at::detail::empty_generic(sizes, &allocator, kGpuKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(meant(device));
    return at::detail::empty_strided_generic(sizes, strides, &allocator, kGpuKeys, c10::dtype_or_default(dtype));
}

// --- Looking at other storage ---------------------------------------------------------------------------------------

/// A real GPU's kernel asks for the address as well.
at::Tensor& set_storage_at(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                           c10::SymIntArrayRef strides) {
    static_cast<void>(source.data_ptr());
    c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
    impl.set_storage_keep_dtype(std::move(source));
    impl.set_storage_offset(offset.expect_int());
    impl.set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
    return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
    const auto count = static_cast<std::int64_t>(source.nbytes() / self.element_size());
    return set_storage_at(self, std::move(source), 0, {count}, {1});
}

// --- Calling the host's kernels -----------------------------------------------------------------------------------

/// Operators that only look at other storage in another way: a GPU runs nothing for them.
bool is_view(const c10::OperatorHandle& op) {
    bool has_alias = false;
    for (const c10::Argument& argument : op.schema().arguments()) {
        if (argument.alias_info() && argument.alias_info()->isWrite()) return false;
        has_alias = has_alias || argument.alias_info();
    }
    return has_alias;
}

/// A call's tensors as the host's, and what they stand for.
class HostCall {
public:
    /// uses_bytes: asks storages for their addresses, as a kernel does that reads or writes.
    explicit HostCall(bool uses_bytes) : uses_bytes_(uses_bytes) {}

    c10::IValue to_host(const c10::IValue& value) {
        if (value.isTensor()) return to_host(value.toTensor());
        if (value.isDevice()) return c10::Device(c10::kCPU);
        if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList()) return value;
        c10::impl::GenericList list(value.toList().elementType());
        for (const c10::IValue& element : value.toListRef()) list.push_back(to_host(element));
        return list;
    }

    c10::IValue to_gpu(const c10::IValue& value) {
        if (value.isTensor()) return to_gpu(value.toTensor());
        if (!value.isTensorList()) return value;
        c10::impl::GenericList list(value.toList().elementType());
        for (const c10::IValue& element : value.toListRef()) list.push_back(to_gpu(element));
        return list;
    }

    /// What an operator made of its outputs: other sizes, other memory.
    void write_back() {
        for (const Pair& pair : pairs_) {
            c10::StorageImpl& storage = *pair.gpu.storage().unsafeGetStorageImpl();
            if (pair.host.storage().nbytes() != storage.nbytes() || pair.host.data_ptr() != pair.address) {
                storage.set_nbytes(pair.host.storage().nbytes());
                storage.set_data_ptr_noswap(pointer_over(pair.host));
            }
            if (pair.host.sizes() != pair.gpu.sizes() || pair.host.strides() != pair.gpu.strides()) {
                pair.gpu.unsafeGetTensorImpl()->set_sizes_and_strides(pair.host.sizes(), pair.host.strides());
            }
        }
    }

private:
    struct Pair {
        at::Tensor gpu;
        at::Tensor host;
        const void* address;
    };

    /// The host's storage lives as long as the GPU's over it.
    c10::DataPtr pointer_over(const at::Tensor& host) const {
        auto* const owner = new c10::Storage(host.storage());
        const auto deleter = [](void* context) { delete static_cast<c10::Storage*>(context); };
        return {owner->mutable_data(), owner, deleter, gpu_};
    }

    at::Tensor to_host(const at::Tensor& gpu) {
        if (!gpu.defined() || !gpu.is_cuda()) return gpu;
        if (pairs_.empty()) gpu_ = gpu.device();
        for (const Pair& pair : pairs_) {
            if (pair.gpu.is_same(gpu)) return pair.host;
        }
        c10::StorageImpl& storage = *gpu.storage().unsafeGetStorageImpl();
        void* const address =
            uses_bytes_ ? const_cast<void*>(storage.data()) : storage._mutable_data_ptr_no_checks().get();
        auto whole = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                           c10::DataPtr(address, c10::Device(c10::kCPU)),
                                                           c10::GetCPUAllocator(), true);
        const at::Tensor host = shaped_like(
            gpu, at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(whole)),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU), gpu.dtype()));
        pairs_.push_back({gpu, host, host.data_ptr()});
        return host;
    }

    at::Tensor to_gpu(const at::Tensor& host) {
        if (!host.defined() || !host.device().is_cpu()) return host;
        for (const Pair& pair : pairs_) {
            if (pair.host.is_same(host)) return pair.gpu;
        }
        for (const Pair& pair : pairs_) {
            if (!pair.host.storage().is_alias_of(host.storage())) continue;
            // Like torch's own kernels of views: with the keys of what is looked at.
            return shaped_like(
                host, at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(pair.gpu.storage()),
                                                               pair.gpu.key_set(), host.dtype()));
        }
        auto storage = c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), host.storage().nbytes(), pointer_over(host), &allocator, true);
        return shaped_like(
            host, at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), kGpuKeys, host.dtype()));
    }

    static at::Tensor shaped_like(const at::Tensor& model, at::Tensor tensor) {
        c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
        impl.set_storage_offset(model.storage_offset());
        impl.set_sizes_and_strides(model.sizes(), model.strides());
        tensor._set_conj(model.is_conj());
        tensor._set_neg(model.is_neg());
        return tensor;
    }

    const bool uses_bytes_;
    c10::Device gpu_ = gpu(current_gpu);  // that of the first tensor
    std::vector<Pair> pairs_;
};

/// Operators whose kernels on a GPU take tensors of the host as well.
bool may_mix(const c10::OperatorHandle& op) {
    const std::string& name = op.schema().name();
    return name == "aten::copy_" || name.starts_with("aten::index") || name.starts_with("aten::_index");
}

/// A GPU's kernels take numbers from the host, and nothing larger.
void refuse_host_tensors(const c10::OperatorHandle& op, const c10::IValue& value) {
    if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        TORCH_CHECK(!tensor.defined() || tensor.is_cuda() || tensor.dim() == 0, op.schema().name(),
                    " expects all tensors to be on the GPU, got one of ", tensor.numel(), " elements on the host");
    } else if (value.isTensorList()) {
        for (const c10::IValue& element : value.toListRef()) refuse_host_tensors(op, element);
    }
}

/// A copy between GPUs is made by the one that has the source. Pages are of the first one's and give no other access.
void check_copy_between_gpus(const at::Tensor& to, const at::Tensor& from) {
    if (!to.is_cuda() || !from.is_cuda() || to.device() == from.device()) return;
    const auto* const address = static_cast<const std::byte*>(to.storage().unsafeGetStorageImpl()->data());
    EXPECT_FALSE(is_mapped({address, to.storage().nbytes()})) << "another GPU writes to pages: both are lost";
}

void call_host_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    if (!may_mix(op)) {
        for (const c10::IValue& argument : arguments) refuse_host_tensors(op, argument);
    }
    if (op.schema().name() == "aten::copy_") check_copy_between_gpus(arguments[0].toTensor(), arguments[1].toTensor());
    HostCall call(!is_view(op) && op.schema().name() != "aten::resize_");  // one that grows is pinned
    torch::jit::Stack host;
    for (const c10::IValue& argument : torch::jit::last(*stack, count)) host.push_back(call.to_host(argument));
    torch::jit::drop(*stack, count);
    op.callBoxed(&host);
    call.write_back();
    for (const c10::IValue& result : host) stack->push_back(call.to_gpu(result));
}

/// The host's takes no integers, a GPU's does.
at::Tensor histc(const at::Tensor& self, std::int64_t bins, const at::Scalar& least, const at::Scalar& most) {
    return at::histc(self.cpu().to(c10::kFloat), bins, least, most).to(self.options());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_host_kernel>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("histc", &histc);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Storage_storage_offset", &set_storage_at);
    // What has a kernel for every device that asks a table for the device's own loop.
    for (const char* const name : {"copy_", "fill_.Scalar", "_fused_sdp_choice"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_host_kernel>());
    }
}

}  // namespace
}  // namespace torch_offload::test
