// Python sees the store for machines without an SSD. Layer bindings.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_offload {

/// Adds `PageServer` to the module.
void bind_page_server(pybind11::module_& module);

}  // namespace torch_offload
