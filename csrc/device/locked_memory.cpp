#include "device/locked_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"

namespace torch_offload {

LockedMemory::LockedMemory(const CudaContext& context)
    : context_(context), space_(AddressSpace::process()), file_(::memfd_create("torch_offload", MFD_CLOEXEC)) {
    OFFLOAD_CHECK(file_ >= 0, OutOfTierMemory, "host memory tier: no file in memory for pages: ", std::strerror(errno));
}

LockedMemory::~LockedMemory() {
    if (!extents_.empty()) OFFLOAD_LOG(error, extents_.size(), " ranges of locked memory are left behind");
    ::close(file_);
}

// --- The file -----------------------------------------------------------------------------------------------------

std::uint64_t LockedMemory::take_space(std::size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(size_bytes); found != free_.end()) {
        const std::uint64_t offset = found->second;
        free_.erase(found);
        return offset;
    }
    OFFLOAD_CHECK(::ftruncate(file_, static_cast<off_t>(end_bytes_ + size_bytes)) == 0, OutOfTierMemory,
                  "host memory tier: ", size_bytes, " bytes of locked memory: ", std::strerror(errno));
    return std::exchange(end_bytes_, end_bytes_ + size_bytes);
}

/// The memory goes back to the system, its place in the file is kept.
void LockedMemory::give_space(const Extent& extent) noexcept try {
    const int how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (::fallocate(file_, how, static_cast<off_t>(extent.offset), static_cast<off_t>(extent.size_bytes)) != 0) {
        OFFLOAD_LOG(error, extent.size_bytes, " bytes of locked memory are not given back: ", std::strerror(errno));
    }
    const std::lock_guard lock(mutex_);
    free_.emplace(extent.size_bytes, extent.offset);
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, extent.size_bytes, " bytes of a file in memory are lost: ", error.what());
}

// --- Ranges -------------------------------------------------------------------------------------------------------

void LockedMemory::commit(std::span<std::byte> range, HugePages) {
    Extent extent{range.size(), take_space(range.size()), false};
    try {
        space_.map_file(range, file_, extent.offset, Protection::read_write);
        extent.is_locked = context_.register_host(range);
        const std::lock_guard lock(mutex_);
        extents_.emplace(range.data(), extent);
    } catch (...) {
        drop(range.data(), extent);
        throw;
    }
}

/// The driver lets go of it first. On a lost device it has.
void LockedMemory::drop(std::byte* begin, const Extent& extent) noexcept {
    const std::span<std::byte> range(begin, extent.size_bytes);
    try {
        if (extent.is_locked && !context_.is_lost()) context_.unregister_host(range);
        space_.decommit(range);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, range.size(), " bytes of host memory stay locked: ", error.what());
        return;
    }
    give_space(extent);
}

/// Anything else that lies there, such as what an access ended on, is the process's.
void LockedMemory::decommit(std::span<std::byte> range) {
    Extents::node_type found;
    {
        const std::lock_guard lock(mutex_);
        const auto at = extents_.find(range.data());
        OFFLOAD_CHECK(at == extents_.end() || at->second.size_bytes == range.size(), LogicError, "decommit of ",
                      range.size(), " bytes of what was committed at once at ", static_cast<const void*>(range.data()));
        if (at != extents_.end()) found = extents_.extract(at);
    }
    if (!found) return space_.decommit(range);
    drop(range.data(), found.mapped());
}

/// A segment's addresses may still have what was committed elsewhere.
void LockedMemory::release(std::span<std::byte> range) noexcept try {
    std::vector<std::pair<std::byte*, Extent>> gone;
    {
        const std::lock_guard lock(mutex_);
        std::byte* const end = range.data() + range.size();
        for (auto at = extents_.lower_bound(range.data()); at != extents_.end() && at->first < end;) {
            gone.emplace_back(*at);
            at = extents_.erase(at);
        }
        moved_.erase(moved_.lower_bound(range.data()), moved_.lower_bound(end));
    }
    for (const auto& [begin, extent] : gone) drop(begin, extent);
    space_.release(range);
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, "addresses are lost: ", error.what());
}

/// There and back: where it was committed it stays.
void LockedMemory::move(std::span<std::byte> from, std::byte* to, Protection protection) {
    std::optional<std::uint64_t> offset;  // nothing: it comes back
    {
        const std::lock_guard lock(mutex_);
        const auto extent = extents_.find(from.data());
        if (extent != extents_.end() && extent->second.size_bytes == from.size()) {
            offset = extent->second.offset;
        } else {
            const auto moved = moved_.find(from.data());
            OFFLOAD_CHECK(moved != moved_.end() && moved->second == to, LogicError, "move of ", from.size(),
                          " bytes at ", static_cast<const void*>(from.data()),
                          ", which were not committed at once, or not there");
        }
    }
    if (offset) {
        space_.map_file({to, from.size()}, file_, *offset, protection);
        space_.hide_from_fork({to, from.size()}, true);  // a child would share it
    } else {
        space_.decommit(from);
    }
    const std::lock_guard lock(mutex_);
    if (offset) {
        moved_[to] = from.data();
    } else {
        moved_.erase(from.data());
    }
}

bool LockedMemory::is_locked(std::span<const std::byte> range) const {
    const std::lock_guard lock(mutex_);
    auto after = extents_.upper_bound(const_cast<std::byte*>(range.data()));
    if (after == extents_.begin()) return false;
    const auto& [begin, extent] = *--after;
    return extent.is_locked && range.data() + range.size() <= begin + extent.size_bytes;
}

}  // namespace torch_offload
