// Copies between a GPU and its host, through memory of the host's that does not move. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/cuda_event.h"
#include "device/stream.h"

namespace torch_offload {

/// Copies of one stream that are under way, and the bytes that have to be brought from where the GPU put them.
class CudaCopies;

/// A ring of buffers that the driver has registered, at addresses that stay. Pages of the host move with mremap and so
/// cannot be registered themselves (docs/adr/0005).
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

/// One side stream. A copy to the device has left `from` when copy() returns; one to the host has arrived when an event
/// behind it was waited for, or has_passed() said so: whoever asks brings the bytes over.
/// What it needs of the driver is made by the first copy, so that what fails there fails as a copy.
/// Threads: as Stream; events from any.
class CudaStream final : public Stream {
public:
    CudaStream(const CudaContext& context, std::shared_ptr<CudaEventPool> events, LinkDirection direction,
               std::size_t buffer_bytes);
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
    std::shared_ptr<CudaCopies> copies_;
    std::unique_ptr<CudaStaging> staging_;
    CuStream stream_ = nullptr;
};

}  // namespace torch_offload
