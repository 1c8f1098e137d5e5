// The engine's counters as a Python dictionary. Layer bindings.
#pragma once

#include <pybind11/pybind11.h>

#include "autograd/engine.h"

namespace torch_offload {

/// Pre: the GIL is held.
pybind11::dict statistics_of(Engine& engine);

}  // namespace torch_offload
