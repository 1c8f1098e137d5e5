// The surroundings in which a recorded kernel runs, wherever and whenever that is. Layer autograd.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cfenv>
#include <cstdint>
#include <string>
#include <string_view>

namespace torch_offload {

/// How many threads a kernel may use. `one` keeps work done beside the training thread from crowding it out.
enum class KernelThreads : std::uint8_t { one, all };

/// The floating-point environment of a thread: rounding, and whether denormals are flushed.
class FloatEnvironment {
public:
    static FloatEnvironment current() noexcept;
    /// As bytes, for another process of the same kind of processor. Throws: InvalidArgument for bytes that are none.
    std::string to_bytes() const;
    static FloatEnvironment from_bytes(std::string_view bytes);
    void install() const noexcept;

private:
    std::fenv_t environment_{};
};

/// While one lives, operators called on this thread reach the CPU kernel directly (no autograd, autocast, mode or
/// transform sees them) and compute as on the thread that recorded them.
class KernelScope {
public:
    KernelScope(const FloatEnvironment& environment, KernelThreads threads);
    ~KernelScope();
    KernelScope(const KernelScope&) = delete;
    KernelScope& operator=(const KernelScope&) = delete;

private:
    c10::impl::ForceDispatchKeyGuard keys_;
    FloatEnvironment former_environment_;
    int former_threads_ = 0;  // 0: left as they are
};

}  // namespace torch_offload
