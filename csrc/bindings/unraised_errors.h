// Errors of accesses behind the dispatcher reach the main thread or, where it has ended, the exit status. Layer
// bindings: includes Python, autograd and pager.
#pragma once

#include <memory>

#include "autograd/engine.h"
#include "pager/fault_errors.h"

namespace torch_offload {

/// For the options of every engine: what its pagers keep is raised between two bytecodes of the main thread, unless a
/// pin has raised it before; what they leave is raised all the same. Threads: any, with or without the GIL.
FaultNotice fault_notice();

/// From now on such errors of the engine are found. It may end at any time.
void watch_faults(const std::shared_ptr<Engine>& engine);

/// Called once, by the module's init.
void install_fault_raiser();

/// Python ends. What is not raised now is written to stderr at the very end of the process, whose exit status is
/// then 1.
void stop_raising_faults();

}  // namespace torch_offload
