// The engine's log of activities as Python sees it. Layer bindings.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "autograd/engine.h"

namespace torch_offload {

void bind_activities(pybind11::module_& module);

/// What the log holds now; nothing if it was never started.
std::optional<ActivityRecord> activities_of(Engine& engine);

}  // namespace torch_offload
