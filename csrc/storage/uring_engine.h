// The io_uring engine; its source is the only file that includes liburing. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "storage/io_engine.h"

namespace torch_offload {

/// Whether memory can be registered with the ring.
enum class UringBuffers : std::uint8_t { fixed, plain };

/// An engine over one ring of its own. The constructing thread need not be the one that uses it: the ring starts
/// disabled and is enabled by the thread of the first call, which the kernel then holds to be the only issuer.
/// Destroying it, in whichever thread, waits for what is in flight (at most 30 s, then it logs an error): after that no
/// transfer touches the caller's memory and nothing of it is locked. The result of a transfer not reaped by then is
/// unknown. The kernel takes some 40 ms for it.
/// Throws: InvalidArgument with the reason if the system or the build has no io_uring, or refuses to register.
std::unique_ptr<IoEngine> make_uring_engine(UringBuffers buffers, std::size_t capacity);

}  // namespace torch_offload
