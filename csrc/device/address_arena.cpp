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

std::optional<std::size_t> AddressArena::grow(std::size_t block_bytes) noexcept {
    if (block_bytes > top_bytes_ - bottom_bytes_) return std::nullopt;
    if (block_bytes < kHugePageBytes) return top_bytes_ -= block_bytes;
    const std::size_t offset_bytes = bottom_bytes_;
    // The gap keeps weight, gradient and moments of one size from lying at large powers of two from each other, where
    // their bytes compete for the same cache sets: an update over four such tensors ran several times slower.
    bottom_bytes_ += block_bytes + std::min(kHugePageBytes, top_bytes_ - bottom_bytes_ - block_bytes);
    return offset_bytes;
}

void FaultTable::set(std::size_t offset_bytes, std::size_t size_bytes, FaultTarget* target) noexcept {
    constexpr std::size_t kSectorsPerGranule = kAddressGranuleBytes / kSectorBytes;
    std::size_t sectors = divide_up(size_bytes, kSectorBytes);
    for (std::size_t i = offset_bytes / kAddressGranuleBytes; sectors > 0; ++i) {
        const std::size_t here = std::min(sectors, kSectorsPerGranule);
        std::atomic_ref(sectors_[i]).store(static_cast<std::uint8_t>(here), std::memory_order_relaxed);
        std::atomic_ref(targets_[i]).store(target, std::memory_order_release);
        sectors -= here;
    }
}

FaultTarget* FaultTable::find(std::size_t offset_bytes) const noexcept {
    const std::size_t i = offset_bytes / kAddressGranuleBytes;
    FaultTarget* target = std::atomic_ref(targets_[i]).load(std::memory_order_acquire);
    const std::size_t end_bytes = std::atomic_ref(sectors_[i]).load(std::memory_order_relaxed) * kSectorBytes;
    return offset_bytes % kAddressGranuleBytes < end_bytes ? target : nullptr;
}

}  // namespace torch_offload
