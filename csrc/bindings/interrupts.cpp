#include "bindings/interrupts.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <thread>

#include "base/wait.h"
#include "bindings/python_errors.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

/// Python runs handlers on its main thread only.
bool is_main_thread() noexcept { return ::gettid() == ::getpid(); }

/// A thread that waits while it holds the GIL lends it: the main thread needs it here.
void check_signals() {
    if (!is_python_there()) return;
    if (PyGILState_Check()) {
        const py::gil_scoped_release lent;
        std::this_thread::yield();
    }
    if (!is_main_thread()) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;
    python_error carrier;
    carrier.persist();
    throw carrier;
}

}  // namespace

void install_interrupt_check() { set_interrupt_check(&check_signals); }

}  // namespace torch_offload
