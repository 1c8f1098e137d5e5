#include "bindings/python_errors.h"

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "autograd/error_bridge.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

const char* type_name_of(const OffloadError& error) noexcept {
    if (dynamic_cast<const OutOfTierMemory*>(&error)) return "OutOfTierMemory";
    if (dynamic_cast<const CorruptPage*>(&error)) return "PageCorruptError";
    if (dynamic_cast<const TierIoError*>(&error)) return "TierIOError";
    if (dynamic_cast<const InvalidArgument*>(&error)) return "ConfigError";
    return "OffloadError";
}

/// An OSError made of a number and a text has `errno` and `strerror`.
py::object make_exception(const py::object& type, const OffloadError& error) {
    const auto* io_error = dynamic_cast<const TierIoError*>(&error);
    if (io_error && io_error->error_number() != 0) return type(io_error->error_number(), error.what());
    return type(error.what());
}

/// Pre: the GIL is held.
void set_python_error(const OffloadError& error) {
    try {
        const py::object type = py::module_::import("torch_offload.errors").attr(type_name_of(error));
        PyErr_SetObject(type.ptr(), make_exception(type, error).ptr());
    } catch (py::error_already_set& failure) {
        failure.restore();
    }
}

void translate(std::exception_ptr thrown) {
    if (!thrown) return;
    try {
        std::rethrow_exception(thrown);
    } catch (const OffloadError& error) {
        set_python_error(error);
    } catch (python_error& error) {
        error.restore();
    }
}

}  // namespace

bool is_python_there() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsInitialized() && !Py_IsFinalizing();
#else
    return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

void raise_python(const OffloadError& error) {
    if (!is_python_there()) return;
    // A worker of a kernel's parallel loop must not wait for the GIL, which the thread that waits for the loop may
    // hold. The loop hands the C++ exception over to that thread.
    if (at::in_parallel_region() && !PyGILState_Check()) return;
    const py::gil_scoped_acquire gil;
    set_python_error(error);
    // Persisted: the thread may have no Python state of its own once the GIL is given back.
    python_error carrier;
    carrier.persist();
    throw carrier;
}

void install_error_translation() {
    py::register_local_exception_translator(&translate);
    set_error_raiser(&raise_python);
}

}  // namespace torch_offload
