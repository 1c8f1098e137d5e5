// What an engine does at one moment, as a Python dictionary. Layer bindings.
#pragma once

#include <pybind11/pybind11.h>

#include "autograd/engine.h"

namespace torch_offload {

/// Of the host's pager, and of the device's where there is one. Waits some seconds at most, without the GIL.
/// Pre: the GIL is held.
pybind11::dict dump_of(Engine& engine);

}  // namespace torch_offload
