// A GPU's memory under addresses that never change. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "device/cuda_driver.h"
#include "device/memory.h"

namespace torch_offload {

/// Physical memory comes from the driver in granules (2 MiB), each mapped whole at one address at a time; moving is
/// unmapping here and mapping there. What it does not have, for want of a backing segment on a GPU: targets of accesses
/// to missing memory (a kernel that makes one loses the device), memory that is read-only to kernels (writes are known
/// from the dispatcher), and anything that a fork could see. The driver does not wait for kernels before it unmaps:
/// whoever moves memory has waited for its uses. Threads: any; of one range one at a time.
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
    void protect(std::span<std::byte> range, Protection protection) override;
    void hide_from_fork(std::span<std::byte>, bool) override {}
    /// Where there is memory: kernels cannot be helped where there is none.
    void poison(std::span<std::byte> range) noexcept override;
    void fill_zero(std::span<std::byte> range) override;

private:
    std::size_t check_granules(std::span<const std::byte> range, const char* what) const;
    std::byte* granule(std::span<std::byte> range, std::size_t i) const { return range.data() + i * granule_bytes_; }
    void map(std::byte* address, CuMemory memory);
    void unmap(std::byte* address);
    void set_access(std::span<std::byte> range, Protection protection);
    void move_back(std::span<const CuMemory> memory, std::span<std::byte> from, std::byte* to, std::size_t unmapped,
                   std::size_t mapped) noexcept;
    void give_back(std::byte* address, CuMemory memory, bool is_mapped) noexcept;
    void fill(std::span<std::byte> range, std::byte value);
    void enter(std::span<std::byte> range, std::span<const CuMemory> memory);
    std::vector<CuMemory> take_out(std::span<std::byte> range, const char* what);

    const CudaContext& context_;
    std::size_t granule_bytes_ = 0;
    CuStream stream_ = nullptr;  // of fills
    std::mutex mutex_;           // guards the next two; a leaf, not held during calls of the driver
    std::unordered_map<std::byte*, std::size_t> reserved_;  // address -> size bytes
    std::unordered_map<std::byte*, CuMemory> granules_;     // by where they are mapped
};

}  // namespace torch_offload
