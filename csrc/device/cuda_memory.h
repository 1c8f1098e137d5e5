// A GPU's memory under addresses that never change. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

#include "device/cuda_driver.h"
#include "device/memory.h"

namespace torch_offload {

/// What is committed at once is one handle of the driver's, which stays mapped there; moving maps it at another address
/// as well, and back takes that mapping away. What it does not have, for want of a backing segment on a GPU: targets of
/// accesses to missing memory (a kernel that makes one loses the device), memory that is read-only to kernels (writes
/// are known from the dispatcher), and anything that a fork could see. The driver does not wait for kernels before it
/// unmaps: whoever moves memory has waited for its uses. Threads: any; of one range one at a time.
class CudaMemory final : public Memory {
public:
    /// The context outlives it.
    explicit CudaMemory(const CudaContext& context);
    ~CudaMemory() override;

    std::size_t granularity_bytes() const noexcept override { return granule_bytes_; }
    std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target) override;
    void set_target(std::span<std::byte>, FaultTarget*) override {}
    void release(std::span<std::byte> range) noexcept override;
    /// Throws: OutOfTierMemory if others have the device's memory; nothing was committed then.
    void commit(std::span<std::byte> range, HugePages huge_pages) override;
    void decommit(std::span<std::byte> range) override;
    void move(std::span<std::byte> from, std::byte* to, Protection protection) override;
    bool keeps_place() const noexcept override { return true; }
    /// Kernels may always read and write what is mapped.
    void protect(std::span<std::byte>, Protection) override {}
    void hide_from_fork(std::span<std::byte>, bool) override {}
    /// Where there is memory: kernels cannot be helped where there is none.
    void poison(std::span<std::byte> range) noexcept override;
    void fill_zero(std::span<std::byte> range) override;

private:
    struct Extent {
        std::size_t size_bytes = 0;
        CuMemory memory = 0;
        std::byte* alias = nullptr;  // where it is mapped as well
    };
    struct Alias {
        std::size_t size_bytes = 0;
        std::byte* committed_at = nullptr;
    };
    void check_granules(std::span<const std::byte> range, const char* what) const;
    void map(std::span<std::byte> range, CuMemory memory);
    void unmap(std::span<std::byte> range);
    void try_unmap(std::span<std::byte> range) noexcept;
    void give_back(std::byte* begin, const Extent& extent) noexcept;
    void fill(std::span<std::byte> range, std::byte value);
    void try_release(CuMemory memory, std::size_t size_bytes) noexcept;
    std::optional<CuMemory> memory_to_move(std::span<std::byte> from, const std::byte* to);

    const CudaContext& context_;
    std::size_t granule_bytes_ = 0;
    CuStream stream_ = nullptr;  // of fills
    std::mutex mutex_;           // guards the next three; a leaf, not held during calls of the driver
    std::unordered_map<std::byte*, std::size_t> reserved_;  // address -> size bytes
    std::map<std::byte*, Extent> extents_;                  // by where they were committed
    std::map<std::byte*, Alias> aliases_;                   // by where memory is mapped as well
};

}  // namespace torch_offload
