// Whether this process is a forked child of the one that made the first engine. Layer autograd: includes nothing.
#pragma once

namespace torch_offload {

/// Starts watching for forks; once is enough. Threads: any.
void watch_forks();

/// True in a child forked after watch_forks(): the engine's threads, and the memory of paged tensors, stayed with
/// the parent. Async-signal-safe.
bool in_forked_child() noexcept;

}  // namespace torch_offload
