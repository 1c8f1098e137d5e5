// Copies between a GPU and its host, through memory of the host's that does not move. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/cuda_event.h"
#include "device/locked_memory.h"
#include "device/stream.h"

namespace torch_offload {

/// Copies of one stream that are under way, and the bytes that have to be brought from where the GPU put them.
class CudaCopies;

/// A ring of buffers that the driver has registered, for pages of the host that are not registered themselves
/// (docs/adr/0005).
class CudaStaging {
public:
    static constexpr std::size_t kBufferCount = 4;  // one that is copied, one that waits, their neighbours

    CudaStaging(const CudaContext& context, std::size_t buffer_bytes);
    ~CudaStaging();
    CudaStaging(const CudaStaging&) = delete;
    CudaStaging& operator=(const CudaStaging&) = delete;

    /// False: the system refused, and pages are copied from where they lie.
    bool is_registered() const noexcept { return is_registered_; }
    std::size_t buffer_bytes() const noexcept { return buffer_bytes_; }
    std::span<std::byte> buffer(std::uint64_t turn) const noexcept {
        return memory_.subspan(turn % kBufferCount * buffer_bytes_, buffer_bytes_);
    }

private:
    const CudaContext& context_;
    std::size_t buffer_bytes_;
    std::span<std::byte> memory_;
    bool is_registered_ = false;
};

/// One side stream. Locked memory is copied where it lies, other memory by way of the buffers: what goes to the device
/// has left `from` then when copy() returns, and what goes to the host is brought over by who waits for an event behind
/// it, or is told by has_passed() that it has passed.
/// What it needs of the driver is made by the first copy, so that what fails there fails as a copy.
/// Threads: as Stream; events from any.
class CudaStream final : public Stream {
public:
    /// `host`: of the pages that are copied; nullptr: it is not known and never locked.
    CudaStream(const CudaContext& context, std::shared_ptr<CudaEventPool> events, LinkDirection direction,
               std::size_t buffer_bytes, const LockedMemory* host = nullptr);
    ~CudaStream() override;
    CudaStream(const CudaStream&) = delete;
    CudaStream& operator=(const CudaStream&) = delete;

    /// Waits for older copies where all buffers are in use.
    void copy(std::span<std::byte> to, std::span<const std::byte> from) override;
    std::shared_ptr<const Event> record() override;

private:
    void open();
    std::shared_ptr<const Event> mark();
    void copy_through_buffer(std::span<std::byte> to, std::span<const std::byte> from);
    void queue(std::span<std::byte> to, std::span<const std::byte> from);

    const CudaContext& context_;
    std::shared_ptr<CudaEventPool> events_;
    const LinkDirection direction_;
    const std::size_t buffer_bytes_;
    const LockedMemory* const host_;
    std::shared_ptr<CudaCopies> copies_;
    std::unique_ptr<CudaStaging> staging_;
    CuStream stream_ = nullptr;
};

}  // namespace torch_offload
