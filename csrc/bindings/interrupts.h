// Signals end waits of the program for the disk. Layer bindings: includes Python, torch and base.
#pragma once

namespace torch_offload {

/// From now on a wait of the main thread that takes long runs the handlers of signals that have come, and ends with
/// what one raises. Called once, by the module's init.
void install_interrupt_check();

}  // namespace torch_offload
