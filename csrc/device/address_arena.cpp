#include "device/address_arena.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace torch_offload {

std::size_t AddressArena::block_bytes(std::size_t size_bytes) noexcept {
    const std::size_t unit = size_bytes < kHugePageBytes ? kAddressGranuleBytes : kHugePageBytes;
    return round_up(size_bytes, std::max(unit, std::bit_floor(size_bytes) / 8));
}

std::optional<std::size_t> AddressArena::take(std::size_t size_bytes) {
    if (size_bytes == 0 || size_bytes > capacity_bytes_) return std::nullopt;
    const std::size_t block = block_bytes(size_bytes);
    Blocks& blocks = blocks_[block];
    if (blocks.free.empty()) {
        if (blocks.free.capacity() <= blocks.made) blocks.free.reserve(2 * blocks.made + 1);
        const std::optional<std::size_t> made = grow(block);
        if (!made) return std::nullopt;
        blocks.free.push_back(*made);
        ++blocks.made;
    }
    const std::size_t offset = blocks.free.back();
    taken_.emplace(offset, size_bytes);
    blocks.free.pop_back();
    return offset;
}

bool AddressArena::give_back(std::size_t offset_bytes, std::size_t size_bytes) noexcept {
    const auto taken = taken_.find(offset_bytes);
    if (taken == taken_.end() || taken->second != size_bytes) return false;
    blocks_.find(block_bytes(size_bytes))->second.free.push_back(offset_bytes);
    taken_.erase(taken);
    return true;
}

bool AddressArena::is_taken(std::size_t offset_bytes, std::size_t size_bytes) const {
    const auto taken = taken_.find(offset_bytes);
    return taken != taken_.end() && taken->second == size_bytes;
}

bool AddressArena::is_part_of_taken(std::size_t offset_bytes, std::size_t size_bytes) const {
    auto taken = taken_.upper_bound(offset_bytes);
    if (taken == taken_.begin()) return false;
    --taken;
    return offset_bytes + size_bytes <= taken->first + taken->second;
}

std::optional<std::size_t> AddressArena::grow(std::size_t block_bytes) noexcept {
    if (block_bytes > top_bytes_ - bottom_bytes_) return std::nullopt;
    if (block_bytes < kHugePageBytes) return top_bytes_ -= block_bytes;
    const std::size_t offset_bytes = bottom_bytes_;
    // The gap keeps weight, gradient and moments of one size from lying at large powers of two from each other, where
    // their bytes compete for the same cache sets: an update over four such tensors ran several times slower.
    bottom_bytes_ += block_bytes + std::min(kHugePageBytes, top_bytes_ - bottom_bytes_ - block_bytes);
    return offset_bytes;
}

FaultTable::SharedGranule* FaultTable::shared_granule(FaultTarget* entry) noexcept {
    const auto bits = reinterpret_cast<std::uintptr_t>(entry);
    return bits % 2 == 0 ? nullptr : reinterpret_cast<SharedGranule*>(bits - 1);
}

/// From now on the granule has a pointer a sector.
void FaultTable::share(std::size_t granule) {
    FaultTarget* const entry = targets_[granule];
    if (shared_granule(entry)) return;
    SharedGranule& shared = *shared_.emplace_back(std::make_unique<SharedGranule>());
    std::fill_n(shared.begin(), sectors_[granule], entry);
    std::atomic_ref(targets_[granule])
        .store(reinterpret_cast<FaultTarget*>(reinterpret_cast<std::uintptr_t>(&shared) + 1),
               std::memory_order_release);
}

void FaultTable::set(std::size_t offset_bytes, std::size_t size_bytes, FaultTarget* target) {
    std::size_t granule = offset_bytes / kAddressGranuleBytes;
    std::size_t first = offset_bytes % kAddressGranuleBytes / kSectorBytes;
    if (first != 0 && target) share(granule);
    for (std::size_t left = divide_up(size_bytes, kSectorBytes); left > 0; ++granule) {
        const std::size_t count = std::min(left, kSectorsPerGranule - first);
        if (SharedGranule* const shared = shared_granule(targets_[granule])) {
            for (std::size_t i = first; i < first + count; ++i) {
                std::atomic_ref((*shared)[i]).store(target, std::memory_order_release);
            }
        } else if (first == 0) {  // or nobody has a sector of it yet
            std::atomic_ref(sectors_[granule]).store(static_cast<std::uint8_t>(count), std::memory_order_relaxed);
            std::atomic_ref(targets_[granule]).store(target, std::memory_order_release);
        }
        left -= count;
        first = 0;
    }
}

FaultTarget* FaultTable::find(std::size_t offset_bytes) const noexcept {
    const std::size_t granule = offset_bytes / kAddressGranuleBytes;
    const std::size_t sector = offset_bytes % kAddressGranuleBytes / kSectorBytes;
    FaultTarget* const entry = std::atomic_ref(targets_[granule]).load(std::memory_order_acquire);
    if (SharedGranule* const shared = shared_granule(entry)) {
        return std::atomic_ref((*shared)[sector]).load(std::memory_order_acquire);
    }
    return sector < std::atomic_ref(sectors_[granule]).load(std::memory_order_relaxed) ? entry : nullptr;
}

}  // namespace torch_offload
