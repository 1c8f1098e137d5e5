#include "support/fake_cuda.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace torch_offload::test {
namespace {

/// A string as a template argument.
template <std::size_t Size>
struct Symbol {
    constexpr Symbol(const char (&text)[Size]) { std::copy_n(text, Size, characters); }
    char characters[Size];
};

/// A function of the driver's, made of a method.
template <auto Method, Symbol Name>
struct Entry;
template <typename... Arguments, CuResult (FakeCuda::*Method)(Arguments...), Symbol Name>
struct Entry<Method, Name> {
    static CuResult call(Arguments... arguments) {
        if (const CuResult result = FakeCuda::current()->begin_call(Name.characters); result != CuResult::success)
            return result;
        return (FakeCuda::current()->*Method)(arguments...);
    }
};

CuContext the_context() { return reinterpret_cast<CuContext>(std::uintptr_t{0xC0}); }

}  // namespace

CudaFunctions FakeCuda::functions() {
    CudaFunctions functions;
#define OFFLOAD_ENTER(symbol, parameters) functions.symbol = &Entry<&FakeCuda::symbol, #symbol>::call;
    OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_ENTER)
#undef OFFLOAD_ENTER
    return functions;
}

// --- What tests ask for -------------------------------------------------------------------------------------------

void FakeCuda::fail(const std::string& symbol, CuResult result, std::size_t skip) {
    const std::lock_guard lock(mutex_);
    failures_.emplace(symbol, Failure{calls_[symbol] + skip, result, false});
}

void FakeCuda::lose_at(const std::string& symbol, CuResult result, std::size_t skip) {
    const std::lock_guard lock(mutex_);
    failures_.emplace(symbol, Failure{calls_[symbol] + skip, result, true});
}

void FakeCuda::forgive() {
    const std::lock_guard lock(mutex_);
    failures_.clear();
    failing_copy_ = SIZE_MAX;
}

void FakeCuda::fail_copy(CuResult result, std::size_t skip) {
    const std::lock_guard lock(mutex_);
    failing_copy_ = copies_ + skip;
    copy_failure_ = result;
}

std::size_t FakeCuda::call_count(const std::string& symbol) const {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(symbol);
    return found == calls_.end() ? 0 : found->second;
}

std::size_t FakeCuda::created_bytes() const {
    const std::lock_guard lock(mutex_);
    return created_bytes_;
}

std::size_t FakeCuda::peak_created_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_created_bytes_;
}

bool FakeCuda::is_mapped(std::span<const std::byte> memory) const {
    const std::lock_guard lock(mutex_);
    return covers(memory, true);
}

bool FakeCuda::is_registered(std::span<const std::byte> memory) const {
    const std::lock_guard lock(mutex_);
    return covers_registered(memory);
}

CuResult FakeCuda::begin_call(const std::string& symbol) {
    const std::lock_guard lock(mutex_);
    const std::size_t number = calls_[symbol]++;
    const bool works_always =
        symbol.starts_with("cuGetError") || symbol.starts_with("cuCtxP") || symbol.starts_with("cuThread");
    if (lost_by_ != CuResult::success && !works_always) return lost_by_;
    if (invalidate_captures_that_forbid(symbol)) return CuResult::capture_unsupported;
    const auto [begin, end] = failures_.equal_range(symbol);
    const auto asked = std::find_if(begin, end, [&](const auto& entry) { return entry.second.at_call == number; });
    if (asked == end) return CuResult::success;
    if (asked->second.loses_device) lose(asked->second.result);
    return asked->second.result;
}

// --- The driver and its context -----------------------------------------------------------------------------------

CuResult FakeCuda::cuInit(unsigned) { return CuResult::success; }

CuResult FakeCuda::cuDriverGetVersion(int* version) {
    *version = options_.version;
    return CuResult::success;
}

CuResult FakeCuda::cuGetErrorName(CuResult, const char** name) {
    *name = "CUDA_ERROR_FAKE";
    return CuResult::success;
}

CuResult FakeCuda::cuGetErrorString(CuResult, const char** text) {
    *text = "as the test asked";
    return CuResult::success;
}

CuResult FakeCuda::cuDeviceGetCount(int* count) {
    *count = options_.device_count;
    return CuResult::success;
}

CuResult FakeCuda::cuDeviceGet(CuDevice* device, int ordinal) {
    *device = ordinal;
    return CuResult::success;
}

CuResult FakeCuda::cuDeviceGetName(char* name, int size_bytes, CuDevice) {
    std::strncpy(name, "Fake", static_cast<std::size_t>(size_bytes));
    return CuResult::success;
}

CuResult FakeCuda::cuDeviceGetAttribute(int* value, int attribute, CuDevice) {
    EXPECT_EQ(attribute, kCuAttributeVirtualMemory);
    *value = options_.has_virtual_memory ? 1 : 0;
    return CuResult::success;
}

CuResult FakeCuda::cuDevicePrimaryCtxRetain(CuContext* context, CuDevice) {
    const std::lock_guard lock(mutex_);
    ++retained_;
    *context = the_context();
    return CuResult::success;
}

CuResult FakeCuda::cuDevicePrimaryCtxRelease_v2(CuDevice) {
    const std::lock_guard lock(mutex_);
    EXPECT_GT(retained_, 0) << "no context to release";
    --retained_;
    return CuResult::success;
}

CuResult FakeCuda::cuCtxPushCurrent_v2(CuContext context) {
    EXPECT_EQ(context, the_context());
    ++context_depth_;
    return CuResult::success;
}

CuResult FakeCuda::cuCtxPopCurrent_v2(CuContext* context) {
    EXPECT_GT(context_depth_, 0) << "no context to leave";
    --context_depth_;
    *context = the_context();
    return CuResult::success;
}

CuResult FakeCuda::cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
    *lowest = 0;
    *highest = -5;
    return CuResult::success;
}

// --- Memory -------------------------------------------------------------------------------------------------------

CuResult FakeCuda::cuMemGetAllocationGranularity(std::size_t* granule_bytes, const CuAllocationProperties*, int) {
    *granule_bytes = options_.granule_bytes;
    return CuResult::success;
}

CuResult FakeCuda::cuMemAddressReserve(CuAddress* address, std::size_t size_bytes, std::size_t, CuAddress,
                                       unsigned long long) {
    if (size_bytes == 0 || size_bytes % options_.granule_bytes != 0) return CuResult::invalid_value;
    const std::size_t mapped_bytes = size_bytes + options_.granule_bytes;
    void* const mapped = ::mmap(nullptr, mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return CuResult::out_of_memory;
    auto* const begin = static_cast<std::byte*>(mapped);
    const std::size_t skipped = round_up(reinterpret_cast<std::uintptr_t>(begin), options_.granule_bytes) -
                                reinterpret_cast<std::uintptr_t>(begin);
    if (skipped > 0) ::munmap(begin, skipped);
    ::munmap(begin + skipped + size_bytes, mapped_bytes - skipped - size_bytes);
    *address = reinterpret_cast<CuAddress>(begin + skipped);
    const std::lock_guard lock(mutex_);
    reserved_.emplace(*address, size_bytes);
    return CuResult::success;
}

CuResult FakeCuda::cuMemAddressFree(CuAddress address, std::size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = reserved_.find(address);
    if (found == reserved_.end() || found->second != size_bytes) {
        ADD_FAILURE() << "addresses are freed that are no whole range";
        return CuResult::invalid_value;
    }
    const auto inside = mapped_.lower_bound(address);
    EXPECT_TRUE(inside == mapped_.end() || inside->first >= address + size_bytes) << "freed with memory under it";
    ::munmap(pointer_to(address), size_bytes);
    reserved_.erase(found);
    return CuResult::success;
}

/// Filled with something: nobody may take new memory for zeros.
CuResult FakeCuda::cuMemCreate(CuMemory* memory, std::size_t size_bytes, const CuAllocationProperties* properties,
                               unsigned long long) {
    if (size_bytes == 0 || size_bytes % options_.granule_bytes != 0 || properties->location.id != 0) {
        return CuResult::invalid_value;
    }
    const std::lock_guard lock(mutex_);
    if (created_bytes_ + size_bytes > options_.memory_bytes) return CuResult::out_of_memory;
    const int file = ::memfd_create("fake-cuda", MFD_CLOEXEC);
    const std::vector<char> garbage(size_bytes, char(0xA5));
    if (file < 0 || ::pwrite(file, garbage.data(), size_bytes, 0) != static_cast<ssize_t>(size_bytes)) {
        return CuResult::out_of_memory;
    }
    *memory = next_id_++;
    created_.emplace(*memory, Physical{file, size_bytes});
    created_bytes_ += size_bytes;
    peak_created_bytes_ = std::max(peak_created_bytes_, created_bytes_);
    return CuResult::success;
}

CuResult FakeCuda::cuMemRelease(CuMemory memory) {
    const std::lock_guard lock(mutex_);
    const auto found = created_.find(memory);
    if (found == created_.end()) {
        ADD_FAILURE() << "memory is released that is not there";
        return CuResult::invalid_value;
    }
    EXPECT_TRUE(std::ranges::none_of(mapped_, [&](const auto& entry) { return entry.second.memory == memory; }))
        << "memory is released while it is mapped";
    ::close(found->second.file);
    created_bytes_ -= found->second.size_bytes;
    created_.erase(found);
    return CuResult::success;
}

CuResult FakeCuda::cuMemMap(CuAddress address, std::size_t size_bytes, std::size_t offset_bytes, CuMemory memory,
                            unsigned long long) {
    const std::lock_guard lock(mutex_);
    const auto found = created_.find(memory);
    const auto after = reserved_.upper_bound(address);
    const bool is_reserved =
        after != reserved_.begin() && address + size_bytes <= std::prev(after)->first + std::prev(after)->second;
    if (found == created_.end() || found->second.size_bytes != size_bytes || offset_bytes != 0 || !is_reserved) {
        ADD_FAILURE() << "mapped is whole memory at reserved addresses only";
        return CuResult::invalid_value;
    }
    const auto next = mapped_.lower_bound(address);
    const bool is_free =
        (next == mapped_.end() || next->first >= address + size_bytes) &&
        (next == mapped_.begin() || std::prev(next)->first + std::prev(next)->second.size_bytes <= address);
    if (!is_free) {
        ADD_FAILURE() << "mapped over what is mapped";
        return CuResult::already_mapped;
    }
    void* const mapped =
        ::mmap(pointer_to(address), size_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0);
    if (mapped == MAP_FAILED) return CuResult::map_failed;
    mapped_.emplace(address, Mapping{memory, size_bytes});
    return CuResult::success;
}

CuResult FakeCuda::cuMemUnmap(CuAddress address, std::size_t size_bytes) {
    Lock lock(mutex_);
    const auto found = mapped_.find(address);
    if (found == mapped_.end() || found->second.size_bytes != size_bytes) {
        ADD_FAILURE() << "unmapped is what was mapped, whole";
        return CuResult::invalid_value;
    }
    wait_for_uses(lock, {pointer_to(address), size_bytes}, "memory is unmapped under a copy or kernel");
    constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (::mmap(pointer_to(address), size_bytes, PROT_NONE, kReserved, -1, 0) == MAP_FAILED) return CuResult::unknown;
    mapped_.erase(address);
    return CuResult::success;
}

CuResult FakeCuda::cuMemSetAccess(CuAddress address, std::size_t size_bytes, const CuAccessDescription* access,
                                  std::size_t count) {
    const std::lock_guard lock(mutex_);
    if (count != 1 || !covers({pointer_to(address), size_bytes}, false)) {
        ADD_FAILURE() << "access is set where nothing is mapped";
        return CuResult::invalid_value;
    }
    const bool is_accessible = access->access == CuAccess::read_write;
    const int protection = is_accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (::mprotect(pointer_to(address), size_bytes, protection) != 0) return CuResult::unknown;
    for (auto at = mapped_.find(address); at != mapped_.end() && at->first < address + size_bytes; ++at) {
        at->second.is_accessible = is_accessible;
    }
    return CuResult::success;
}

/// The lock is held.
bool FakeCuda::covers(std::span<const std::byte> memory, bool is_accessible) const {
    const auto begin = reinterpret_cast<CuAddress>(memory.data());
    for (CuAddress at = begin; at < begin + memory.size();) {
        const auto after = mapped_.upper_bound(at);
        if (after == mapped_.begin()) return false;
        const auto& [address, mapping] = *std::prev(after);
        if (address + mapping.size_bytes <= at || (is_accessible && !mapping.is_accessible)) return false;
        at = address + mapping.size_bytes;
    }
    return true;
}

bool FakeCuda::covers_registered(std::span<const std::byte> memory) const {
    const auto after = registered_.upper_bound(memory.data());
    if (after == registered_.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return memory.data() + memory.size() <= begin + size;
}

CuResult FakeCuda::cuMemHostRegister_v2(void* memory, std::size_t size_bytes, unsigned) {
    const std::lock_guard lock(mutex_);
    if (context_depth_ == 0) return CuResult::invalid_context;
    if (!options_.may_register) return CuResult::not_permitted;
    registered_.emplace(static_cast<std::byte*>(memory), size_bytes);
    return CuResult::success;
}

CuResult FakeCuda::cuMemHostUnregister(void* memory) {
    Lock lock(mutex_);
    const auto found = registered_.find(static_cast<std::byte*>(memory));
    if (found == registered_.end()) return CuResult::memory_not_registered;
    wait_for_uses(lock, {found->first, found->second}, "host memory is unregistered under a copy");
    registered_.erase(static_cast<std::byte*>(memory));
    return CuResult::success;
}

}  // namespace torch_offload::test
