// Copies between the memories of a device and its host, in order, and how to wait for them. Layer device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace torch_offload {

/// Which way bytes go between a device and its host.
enum class LinkDirection : std::uint8_t { to_device, to_host };
inline constexpr std::size_t kLinkDirectionCount = 2;

/// A point in the order of a stream: it has passed when everything that was queued before it is done.
/// Threads: any.
class Event {
public:
    virtual ~Event() = default;
    virtual bool has_passed() const noexcept = 0;
    /// What it is a point of, to tell it from others: of one queue, older events pass first.
    virtual const void* queue() const noexcept { return nullptr; }
    /// Throws: TierIoError if something that was queued before it failed, or the device is lost; InvalidArgument if it
    /// cannot be waited for yet, which says until when. It has not passed then.
    virtual void wait() const = 0;
};

/// Waits until the event has passed, also where waiting is refused for now, which says nothing of what is before it.
/// Throws: TierIoError as Event::wait(): nothing of it moves any more.
void wait_through_refusals(const Event& event);

/// A queue of copies, done one after the other and beside what the caller does.
/// Threads: one at a time. The memory of a copy stays valid and unused until an event behind it has passed.
class Stream {
public:
    virtual ~Stream() = default;  // waits for what is queued
    /// Pre: equally long.
    virtual void copy(std::span<std::byte> to, std::span<const std::byte> from) = 0;
    virtual std::shared_ptr<const Event> record() = 0;
};

/// What a pager needs from a device beside its memory.
/// Threads: any. Streams and events may not outlive it.
class Device {
public:
    virtual ~Device() = default;
    virtual std::unique_ptr<Stream> make_stream(LinkDirection direction) = 0;
    /// The point behind all that the calling thread has given the device to do: what uses memory that a guard of the
    /// thread's held. nullptr: it is done already, who uses memory has done so when he says so.
    virtual std::shared_ptr<const Event> fence_use() noexcept { return nullptr; }
    /// What the calling thread gives the device from now on runs after what `fence`, made by fence_use(), is behind.
    /// Throws: as Event::wait().
    virtual void order_after(const Event& fence) const { fence.wait(); }
    /// Whether kernels run on the device itself, beside the processor's cores.
    virtual bool has_own_cores() const noexcept { return false; }
    /// Says that the calling thread is about to give the device something to do.
    /// Throws: InvalidArgument if the device would only note it down and do it later, as often as it is told to: the
    /// memory will not be there then. TierIoError if the device is lost.
    virtual void check_use() const {}
    /// Says that `memory` is about to be used by something that no stream orders: a kernel, another page.
    /// Throws: LogicError, on a device that can tell, if a copy to or from it had not passed: a defect of who asks. It
    /// has then.
    virtual void check_idle(std::span<const std::byte> memory) const = 0;
    /// The memory holds nothing any more: a device that is there to find defects makes it unusable.
    virtual void poison(std::span<std::byte> memory) noexcept = 0;
    virtual std::string name() const = 0;
};

}  // namespace torch_offload
