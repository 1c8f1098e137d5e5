// Memory of the host that a GPU copies from and to by itself. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>

#include "device/address_space.h"
#include "device/cuda_driver.h"
#include "device/memory.h"

namespace torch_offload {

/// Page-locked memory under addresses of the process's arena. It lies in a file without a name, so that the same memory
/// can be under two ranges: where it was committed, which the driver has registered and which stays there, and where a
/// page is read and written. Where the system refuses to register, it is pageable memory for the driver.
/// Threads: as Memory.
class LockedMemory final : public Memory {
public:
    /// Throws: OutOfTierMemory if the system gives no such file. The context outlives it.
    explicit LockedMemory(const CudaContext& context);
    ~LockedMemory() override;

    std::size_t granularity_bytes() const noexcept override { return space_.granularity_bytes(); }
    std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target) override {
        return space_.reserve(size_bytes, target);
    }
    void set_target(std::span<std::byte> range, FaultTarget* target) override { space_.set_target(range, target); }
    void release(std::span<std::byte> range) noexcept override;
    /// Takes as long as the system needs to find, clear and lock the memory.
    void commit(std::span<std::byte> range, HugePages huge_pages) override;
    void decommit(std::span<std::byte> range) override;
    void move(std::span<std::byte> from, std::byte* to, Protection protection) override;
    bool keeps_place() const noexcept override { return true; }
    void protect(std::span<std::byte> range, Protection protection) override { space_.protect(range, protection); }
    void hide_from_fork(std::span<std::byte> range, bool hidden) override { space_.hide_from_fork(range, hidden); }
    void poison(std::span<std::byte> range) noexcept override { space_.poison(range); }
    void fill_zero(std::span<std::byte> range) override { space_.fill_zero(range); }

    /// Whether the driver copies from and to the range beside the program.
    bool is_locked(std::span<const std::byte> range) const;

private:
    struct Extent {
        std::size_t size_bytes = 0;
        std::uint64_t offset = 0;
        bool is_locked = false;
    };
    using Extents = std::map<std::byte*, Extent>;
    std::uint64_t take_space(std::size_t size_bytes);
    void give_space(const Extent& extent) noexcept;
    void drop(std::byte* begin, const Extent& extent) noexcept;

    const CudaContext& context_;
    AddressSpace& space_;
    int file_ = -1;
    mutable std::mutex mutex_;                            // guards what follows
    Extents extents_;                                     // by where they were committed
    std::map<const std::byte*, const std::byte*> moved_;  // where one is as well, and where it was committed
    std::multimap<std::size_t, std::uint64_t> free_;      // parts of the file without memory, by size
    std::uint64_t end_bytes_ = 0;                         // of the file
};

}  // namespace torch_offload
