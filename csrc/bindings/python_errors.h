// The one place where engine errors become Python exceptions. Layer bindings: includes Python, torch and base.
#pragma once

#include "base/check.h"

namespace torch_offload {

/// Whether there is an interpreter whose GIL can be taken.
bool is_python_there() noexcept;

/// Sets the Python exception for `error` and throws the C++ exception that carries it through torch's frames.
/// Takes the GIL. Returns only where there is no interpreter to ask any more.
void raise_python(const OffloadError& error);

/// Makes functions bound in this module, and operators called from them, raise the same types; hands raise_python to
/// the layers below. Called once, by the module's init.
void install_error_translation();

}  // namespace torch_offload
