// Carries log lines of engine threads, which never take the GIL, to Python's logging. Layer bindings.
#pragma once

namespace torch_offload {

/// Collects lines at or above `level` (Python's numbers) from now on. At most kMaxQueuedLines wait; more are dropped
/// and counted in one line.
void collect_log(int level);

/// Hands what waits to `logging.getLogger("torch_offload")`. Pre: the GIL is held.
void deliver_log();

}  // namespace torch_offload
