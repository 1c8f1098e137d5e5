// The engine's counters as a Python dictionary. Layer bindings.
#pragma once

#include <pybind11/pybind11.h>

#include "autograd/engine.h"

namespace torch_offload {

/// Waits for locks of the engine without the GIL. Pre: the GIL is held.
pybind11::dict statistics_of(Engine& engine);
/// Ends the engine's use log and returns it as a list of tuples. Pre: the GIL is held.
pybind11::list uses_of(Engine& engine);
/// Parts of other dictionaries, by the same names. Pre: the GIL is held.
pybind11::dict memory_of(const ArenaUsage& usage);
const char* cause_name(StallCause cause) noexcept;

}  // namespace torch_offload
