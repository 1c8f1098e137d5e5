#include "device/cuda_memory.h"

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"

namespace torch_offload {
namespace {

CuAddress address_of(const std::byte* pointer) { return reinterpret_cast<CuAddress>(pointer); }

CuAllocationProperties properties_on(const CudaContext& context) {
    CuAllocationProperties properties;
    properties.location.id = context.ordinal();
    return properties;
}

}  // namespace

CudaMemory::CudaMemory(const CudaContext& context) : context_(context) {
    const CudaContext::Scope scope(context_);
    const CuAllocationProperties properties = properties_on(context_);
    OFFLOAD_CUDA(context_, cuMemGetAllocationGranularity, &granule_bytes_, &properties, kCuGranularityMinimum);
    OFFLOAD_CHECK(granule_bytes_ > 0 && granule_bytes_ % kSectorBytes == 0, LogicError, context_.name(),
                  ": granules of ", granule_bytes_, " bytes");
    OFFLOAD_CUDA(context_, cuStreamCreateWithPriority, &stream_, kCuStreamNonBlocking, 0);
}

CudaMemory::~CudaMemory() {
    if (context_.is_lost()) return;
    try {
        const CudaContext::Scope scope(context_);
        OFFLOAD_CUDA(context_, cuStreamDestroy_v2, stream_);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "a stream is left behind: ", error.what());
    }
    if (!reserved_.empty()) OFFLOAD_LOG(error, context_.name(), ": ", reserved_.size(), " ranges are left behind");
}

/// How many there are.
std::size_t CudaMemory::check_granules(std::span<const std::byte> range, const char* what) const {
    OFFLOAD_CHECK(
        !range.empty() && address_of(range.data()) % granule_bytes_ == 0 && range.size() % granule_bytes_ == 0,
        LogicError, what, " needs whole granules of ", granule_bytes_, " bytes, got ", range.size(), " at ",
        static_cast<const void*>(range.data()));
    return range.size() / granule_bytes_;
}

// --- Addresses ----------------------------------------------------------------------------------------------------

std::span<std::byte> CudaMemory::reserve(std::size_t size_bytes, FaultTarget*) {
    OFFLOAD_CHECK(size_bytes > 0, InvalidArgument, "a range of addresses needs at least 1 byte");
    const std::size_t rounded_bytes = round_up(size_bytes, granule_bytes_);
    const CudaContext::Scope scope(context_);
    CuAddress address = 0;
    OFFLOAD_CUDA(context_, cuMemAddressReserve, &address, rounded_bytes, 0, 0, 0);
    const std::span<std::byte> range(reinterpret_cast<std::byte*>(address), rounded_bytes);
    const std::lock_guard lock(mutex_);
    reserved_.emplace(range.data(), rounded_bytes);
    return range;
}

/// A lost device keeps nothing, and was said to be lost.
void CudaMemory::release(std::span<std::byte> range) noexcept try {
    const std::size_t count = check_granules(range, "release");
    std::vector<std::pair<std::byte*, CuMemory>> memory;
    {
        const std::lock_guard lock(mutex_);
        const auto reserved = reserved_.find(range.data());
        OFFLOAD_CHECK(reserved != reserved_.end() && reserved->second == range.size(), LogicError,
                      "release needs a whole reserved range");
        reserved_.erase(reserved);
        for (std::size_t i = 0; i < count; ++i) {
            if (const auto found = granules_.find(granule(range, i)); found != granules_.end()) {
                memory.emplace_back(found->first, found->second);
                granules_.erase(found);
            }
        }
    }
    if (context_.is_lost()) return;
    const CudaContext::Scope scope(context_);
    for (const auto& [address, handle] : memory) give_back(address, handle, true);
    OFFLOAD_CUDA(context_, cuMemAddressFree, address_of(range.data()), range.size());
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, "addresses are lost: ", error.what());
}

// --- Memory -------------------------------------------------------------------------------------------------------

void CudaMemory::commit(std::span<std::byte> range, HugePages) {
    const std::size_t count = check_granules(range, "commit");
    const CudaContext::Scope scope(context_);
    const CuAllocationProperties properties = properties_on(context_);
    std::vector<CuMemory> made;
    std::size_t mapped = 0;
    try {
        for (; mapped < count; ++mapped) {
            CuMemory memory = 0;
            OFFLOAD_CUDA(context_, cuMemCreate, &memory, granule_bytes_, &properties, 0);
            made.push_back(memory);
            map(granule(range, mapped), memory);
        }
        set_access(range, Protection::read_write);
    } catch (...) {
        for (std::size_t i = 0; i < made.size(); ++i) give_back(granule(range, i), made[i], i < mapped);
        throw;
    }
    enter(range, made);
}

void CudaMemory::decommit(std::span<std::byte> range) {
    check_granules(range, "decommit");
    const CudaContext::Scope scope(context_);
    const std::vector<CuMemory> memory = take_out(range, "decommit");
    for (std::size_t i = 0; i < memory.size(); ++i) give_back(granule(range, i), memory[i], true);
}

/// To the driver. A failure here loses memory at most; the device's next use meets what made it fail.
void CudaMemory::give_back(std::byte* address, CuMemory memory, bool is_mapped) noexcept try {
    if (is_mapped) unmap(address);
    OFFLOAD_CUDA(context_, cuMemRelease, memory);
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, granule_bytes_, " bytes of memory are lost: ", error.what());
}

void CudaMemory::move(std::span<std::byte> from, std::byte* to, Protection protection) {
    const std::span<std::byte> target(to, from.size());
    const std::size_t count = check_granules(from, "move from");
    check_granules(target, "move to");
    const CudaContext::Scope scope(context_);
    const std::vector<CuMemory> memory = take_out(from, "move");
    std::size_t unmapped = 0;
    std::size_t mapped = 0;
    try {
        for (; unmapped < count; ++unmapped) unmap(granule(from, unmapped));
        for (; mapped < count; ++mapped) map(granule(target, mapped), memory[mapped]);
        set_access(target, protection);
    } catch (...) {
        move_back(memory, from, to, unmapped, mapped);
        enter(from, memory);
        throw;
    }
    enter(target, memory);
}

/// After a move that failed: the first `unmapped` are not at `from` any more, the first `mapped` are at `to`.
void CudaMemory::move_back(std::span<const CuMemory> memory, std::span<std::byte> from, std::byte* to,
                           std::size_t unmapped, std::size_t mapped) noexcept try {
    if (context_.is_lost()) return;
    for (std::size_t i = 0; i < mapped; ++i) unmap(to + i * granule_bytes_);
    for (std::size_t i = 0; i < unmapped; ++i) map(granule(from, i), memory[i]);
    set_access(from, Protection::read_write);
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, from.size(), " bytes could not be moved back: ", error.what());
}

void CudaMemory::protect(std::span<std::byte> range, Protection protection) {
    check_granules(range, "protect");
    const CudaContext::Scope scope(context_);
    set_access(range, protection);
}

void CudaMemory::map(std::byte* address, CuMemory memory) {
    OFFLOAD_CUDA(context_, cuMemMap, address_of(address), granule_bytes_, 0, memory, 0);
}

void CudaMemory::unmap(std::byte* address) { OFFLOAD_CUDA(context_, cuMemUnmap, address_of(address), granule_bytes_); }

/// There is no access that only reads.
void CudaMemory::set_access(std::span<std::byte> range, Protection protection) {
    CuAccessDescription access;
    access.location.id = context_.ordinal();
    access.access = protection == Protection::none ? CuAccess::none : CuAccess::read_write;
    OFFLOAD_CUDA(context_, cuMemSetAccess, address_of(range.data()), range.size(), &access, 1);
}

void CudaMemory::enter(std::span<std::byte> range, std::span<const CuMemory> memory) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < memory.size(); ++i) granules_.emplace(granule(range, i), memory[i]);
}

/// Nothing is taken out unless there is memory under all of the range.
std::vector<CuMemory> CudaMemory::take_out(std::span<std::byte> range, const char* what) {
    const std::size_t count = range.size() / granule_bytes_;
    std::vector<CuMemory> memory;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) {
        const auto found = granules_.find(granule(range, i));
        OFFLOAD_CHECK(found != granules_.end(), LogicError, what, ": no memory at ",
                      static_cast<const void*>(granule(range, i)));
        memory.push_back(found->second);
    }
    for (std::size_t i = 0; i < count; ++i) granules_.erase(granule(range, i));
    return memory;
}

// --- Contents -----------------------------------------------------------------------------------------------------

void CudaMemory::fill_zero(std::span<std::byte> range) { fill(range, std::byte{0}); }

void CudaMemory::poison(std::span<std::byte> range) noexcept try {
    fill(range, std::byte{0xFF});
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, range.size(), " bytes cannot be poisoned: ", error.what());
}

/// Waits: the host orders what follows.
void CudaMemory::fill(std::span<std::byte> range, std::byte value) {
    const CudaContext::Scope scope(context_);
    OFFLOAD_CUDA(context_, cuMemsetD8Async, address_of(range.data()), std::to_integer<unsigned char>(value),
                 range.size(), stream_);
    OFFLOAD_CUDA(context_, cuStreamSynchronize, stream_);
}

}  // namespace torch_offload
