// Python sees the probe of a disk and of the I/O engines. Layer bindings.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_offload {

/// Adds `SsdProbe` and `io_engine_refusal` to the module.
void bind_ssd_probe(pybind11::module_& module);

}  // namespace torch_offload
