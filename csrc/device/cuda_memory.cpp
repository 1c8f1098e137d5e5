#include "device/cuda_memory.h"

#include <optional>
#include <utility>
#include <vector>

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

void CudaMemory::check_granules(std::span<const std::byte> range, const char* what) const {
    OFFLOAD_CHECK(
        !range.empty() && address_of(range.data()) % granule_bytes_ == 0 && range.size() % granule_bytes_ == 0,
        LogicError, what, " needs whole granules of ", granule_bytes_, " bytes, got ", range.size(), " at ",
        static_cast<const void*>(range.data()));
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

/// A lost device keeps nothing, and was said to be lost. A segment's addresses may still have what was committed
/// elsewhere.
void CudaMemory::release(std::span<std::byte> range) noexcept try {
    check_granules(range, "release");
    std::vector<std::pair<std::byte*, Extent>> extents;
    std::vector<std::span<std::byte>> aliases;
    {
        const std::lock_guard lock(mutex_);
        const auto reserved = reserved_.find(range.data());
        OFFLOAD_CHECK(reserved != reserved_.end() && reserved->second == range.size(), LogicError,
                      "release needs a whole reserved range");
        reserved_.erase(reserved);
        std::byte* const end = range.data() + range.size();
        for (auto at = extents_.lower_bound(range.data()); at != extents_.end() && at->first < end;) {
            if (aliases_.erase(at->second.alias) != 0) aliases.emplace_back(at->second.alias, at->second.size_bytes);
            extents.emplace_back(*at);
            at = extents_.erase(at);
        }
        for (auto at = aliases_.lower_bound(range.data()); at != aliases_.end() && at->first < end;) {
            aliases.emplace_back(at->first, at->second.size_bytes);
            if (const auto owner = extents_.find(at->second.committed_at); owner != extents_.end()) {
                owner->second.alias = nullptr;
            }
            at = aliases_.erase(at);
        }
    }
    if (context_.is_lost()) return;
    const CudaContext::Scope scope(context_);
    for (const std::span<std::byte> alias : aliases) try_unmap(alias);
    for (const auto& [begin, extent] : extents) give_back(begin, extent);
    OFFLOAD_CUDA(context_, cuMemAddressFree, address_of(range.data()), range.size());
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, "addresses are lost: ", error.what());
}

// --- Memory -------------------------------------------------------------------------------------------------------

void CudaMemory::commit(std::span<std::byte> range, HugePages) {
    check_granules(range, "commit");
    const CudaContext::Scope scope(context_);
    const CuAllocationProperties properties = properties_on(context_);
    CuMemory memory = 0;
    OFFLOAD_CUDA(context_, cuMemCreate, &memory, range.size(), &properties, 0);
    try {
        map(range, memory);
        const std::lock_guard lock(mutex_);
        extents_.emplace(range.data(), Extent{range.size(), memory});
    } catch (...) {
        try_release(memory, range.size());
        throw;
    }
}

void CudaMemory::decommit(std::span<std::byte> range) {
    check_granules(range, "decommit");
    const CudaContext::Scope scope(context_);
    Extent extent;
    {
        const std::lock_guard lock(mutex_);
        const auto found = extents_.find(range.data());
        OFFLOAD_CHECK(found != extents_.end() && found->second.size_bytes == range.size(), LogicError,
                      "decommit: no memory of ", range.size(), " bytes at ", static_cast<const void*>(range.data()));
        extent = found->second;
        extents_.erase(found);
    }
    give_back(range.data(), extent);
}

/// To the driver. A failure here loses memory at most; the device's next use meets what made it fail.
void CudaMemory::give_back(std::byte* begin, const Extent& extent) noexcept {
    try_unmap({begin, extent.size_bytes});
    try_release(extent.memory, extent.size_bytes);
}

void CudaMemory::try_release(CuMemory memory, std::size_t size_bytes) noexcept try {
    OFFLOAD_CUDA(context_, cuMemRelease, memory);
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, size_bytes, " bytes of memory are lost: ", error.what());
}

void CudaMemory::try_unmap(std::span<std::byte> range) noexcept try {
    unmap(range);
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, range.size(), " bytes of addresses are lost: ", error.what());
}

/// What is to be mapped at `to`, or nothing where it comes back from `from`.
std::optional<CuMemory> CudaMemory::memory_to_move(std::span<std::byte> from, const std::byte* to) {
    const std::lock_guard lock(mutex_);
    const auto extent = extents_.find(from.data());
    if (extent != extents_.end() && extent->second.size_bytes == from.size()) return extent->second.memory;
    const auto alias = aliases_.find(from.data());
    const bool comes_back =
        alias != aliases_.end() && alias->second.size_bytes == from.size() && alias->second.committed_at == to;
    OFFLOAD_CHECK(comes_back, LogicError, "move of ", from.size(), " bytes at ", static_cast<const void*>(from.data()),
                  ", which were not committed at once, or not there");
    return std::nullopt;
}

void CudaMemory::move(std::span<std::byte> from, std::byte* to, Protection) {
    const std::span<std::byte> target(to, from.size());
    check_granules(from, "move from");
    check_granules(target, "move to");
    const CudaContext::Scope scope(context_);
    const std::optional<CuMemory> memory = memory_to_move(from, to);
    if (!memory) {
        unmap(from);
        const std::lock_guard lock(mutex_);
        aliases_.erase(from.data());
        if (const auto owner = extents_.find(to); owner != extents_.end()) owner->second.alias = nullptr;
        return;
    }
    map(target, *memory);
    try {
        const std::lock_guard lock(mutex_);
        aliases_.emplace(to, Alias{from.size(), from.data()});
        extents_.at(from.data()).alias = to;
    } catch (...) {
        try_unmap(target);
        throw;
    }
}

/// Where kernels may use it, or not at all. There is no access that only reads.
void CudaMemory::map(std::span<std::byte> range, CuMemory memory) {
    OFFLOAD_CUDA(context_, cuMemMap, address_of(range.data()), range.size(), 0, memory, 0);
    try {
        CuAccessDescription access;
        access.location.id = context_.ordinal();
        OFFLOAD_CUDA(context_, cuMemSetAccess, address_of(range.data()), range.size(), &access, 1);
    } catch (...) {
        if (!context_.is_lost()) try_unmap(range);
        throw;
    }
}

void CudaMemory::unmap(std::span<std::byte> range) {
    OFFLOAD_CUDA(context_, cuMemUnmap, address_of(range.data()), range.size());
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
