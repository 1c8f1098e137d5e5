// A flag that any thread or signal handler raises and a poll(2) sees. Layer storage: includes base only.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "storage/file_descriptor.h"

namespace torch_offload {

/// An eventfd: readable from raise() to clear().
/// Threads: any.
class WakeEvent {
public:
    WakeEvent() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        OFFLOAD_CHECK(event_, InvalidArgument, "eventfd failed: ", std::strerror(errno),
                      "; raise the limit on open files (ulimit -n)");
    }

    /// Async-signal-safe: one write(2), errno kept. It fails only when the flag has been raised 2^64 times.
    void raise() noexcept {
        const int saved_errno = errno;
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof one);
        errno = saved_errno;
    }

    void clear() noexcept {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto taken = ::read(event_.get(), &count, sizeof count);  // EAGAIN: not raised
    }

    int file_descriptor() const noexcept { return event_.get(); }

private:
    FileDescriptor event_;
};

}  // namespace torch_offload
