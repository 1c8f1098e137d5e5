// An accelerator made of host memory: streams that run beside the program, slow links, and checks that a real device
// does not make. Layer device: includes base only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device/stream.h"

namespace torch_offload {

class EmulatedQueue;

struct EmulatedDeviceOptions {
    double bytes_per_second[kLinkDirectionCount] = {};  // by LinkDirection; 0: as fast as memory is copied
    std::chrono::microseconds longest_delay{0};         // before each copy and kernel, drawn from the seed
    std::uint64_t seed = 0;
};

/// Its memory is host memory that a pager hands out under the device's budget; its links have a rate that all streams
/// of one direction share. A copy really happens, when its turn has come. Who uses memory that a copy or a kernel has
/// not finished with is told so: check_idle().
/// Threads: as Device.
class EmulatedDevice final : public Device {
public:
    explicit EmulatedDevice(const EmulatedDeviceOptions& options = {});
    ~EmulatedDevice() override;
    EmulatedDevice(const EmulatedDevice&) = delete;
    EmulatedDevice& operator=(const EmulatedDevice&) = delete;

    std::unique_ptr<Stream> make_stream(LinkDirection direction) override;
    /// Queues a kernel that uses `memory`, behind all that were launched before and beside the program. Without any,
    /// fence_use() says that uses end when their users say so.
    void launch(const std::vector<std::span<std::byte>>& memory, std::function<void()> kernel);
    std::shared_ptr<const Event> fence_use() noexcept override;
    void check_idle(std::span<const std::byte> memory) const override;
    void poison(std::span<std::byte> memory) noexcept override;
    std::string name() const override { return "emulated"; }

private:
    friend class EmulatedStream;
    using Clock = std::chrono::steady_clock;
    /// A copy or kernel that was queued and has not ended, by where it reads or writes.
    struct Use {
        std::size_t size_bytes = 0;
        const char* who = "";
    };

    const Use* use_of(std::span<const std::byte> memory) const;
    void begin_use(std::span<const std::byte> memory, const char* who);
    /// Queues `work`, which uses all of `memory`, or nothing if this throws.
    void push(EmulatedQueue& queue, std::span<const std::span<const std::byte>> memory, const char* who,
              const std::function<void()>& work);
    void end_use(std::span<const std::byte> memory);
    /// When a copy of that many bytes that begins now has left the link.
    Clock::time_point end_of_copy(LinkDirection direction, std::size_t size_bytes);

    const EmulatedDeviceOptions options_;
    mutable std::mutex mutex_;  // guards what follows; never held during a copy
    std::multimap<const std::byte*, Use> uses_;
    mutable std::condition_variable use_ended_;
    std::size_t longest_use_bytes_ = 0;
    Clock::time_point link_free_[kLinkDirectionCount] = {};
    std::uint64_t streams_made_ = 0;
    std::unique_ptr<EmulatedQueue> kernels_;  // made by the first launch
};

}  // namespace torch_offload
