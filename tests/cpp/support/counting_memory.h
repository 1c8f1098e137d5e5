// The process's memory, which counts how much of it there is. Header only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_set>

#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload::test {

/// Counted before the system has it, until the system has it back. Threads: any.
class CountingMemory : public Memory {
public:
    std::size_t peak_bytes() const {
        const std::lock_guard lock(mutex_);
        return peak_sectors_ * kSectorBytes;
    }
    std::size_t populated_bytes() const { return populated_bytes_; }

    std::size_t granularity_bytes() const noexcept override { return memory_.granularity_bytes(); }
    std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target) override {
        return memory_.reserve(size_bytes, target);
    }
    void set_target(std::span<std::byte> range, FaultTarget* target) override { memory_.set_target(range, target); }
    /// Held until the end: somebody else may be given the addresses.
    void release(std::span<std::byte> range) noexcept override {
        const std::lock_guard lock(mutex_);
        memory_.release(range);
        for_each_sector(range, [this](std::uintptr_t sector) { sectors_.erase(sector); });
    }
    void commit(std::span<std::byte> range, HugePages huge_pages) override {
        {
            const std::lock_guard lock(mutex_);
            for_each_sector(range, [this](std::uintptr_t sector) { sectors_.insert(sector); });
            peak_sectors_ = std::max(peak_sectors_, sectors_.size());
        }
        memory_.commit(range, huge_pages);
    }
    void populate(std::span<std::byte> range) noexcept override {
        populated_bytes_ += range.size();
        memory_.populate(range);
    }
    void decommit(std::span<std::byte> range) override {
        const std::lock_guard lock(mutex_);
        memory_.decommit(range);
        for_each_sector(range, [this](std::uintptr_t sector) { sectors_.erase(sector); });
    }
    void move(std::span<std::byte> from, std::byte* to, Protection protection) override {
        const std::lock_guard lock(mutex_);
        memory_.move(from, to, protection);
        const auto there = reinterpret_cast<std::uintptr_t>(to) / kSectorBytes;
        const auto here = reinterpret_cast<std::uintptr_t>(from.data()) / kSectorBytes;
        for_each_sector(from, [&](std::uintptr_t sector) {
            if (sectors_.erase(sector) != 0) sectors_.insert(there + (sector - here));
        });
    }
    void protect(std::span<std::byte> range, Protection protection) override { memory_.protect(range, protection); }
    void hide_from_fork(std::span<std::byte> range, bool hidden) override { memory_.hide_from_fork(range, hidden); }
    void poison(std::span<std::byte> range) noexcept override { memory_.poison(range); }
    void fill_zero(std::span<std::byte> range) override { memory_.fill_zero(range); }

private:
    template <typename Visit>
    static void for_each_sector(std::span<std::byte> range, Visit visit) {
        const auto first = reinterpret_cast<std::uintptr_t>(range.data()) / kSectorBytes;
        for (std::uintptr_t i = 0; i < range.size() / kSectorBytes; ++i) visit(first + i);
    }

    Memory& memory_ = AddressSpace::process();
    mutable std::mutex mutex_;
    std::unordered_set<std::uintptr_t> sectors_;
    std::size_t peak_sectors_ = 0;
    std::atomic<std::size_t> populated_bytes_{0};
};

}  // namespace torch_offload::test
