#include "bindings/unraised_errors.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "autograd/forked_child.h"
#include "base/check.h"
#include "bindings/python_errors.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

struct Unraised {
    std::mutex engines_mutex;
    std::vector<std::weak_ptr<Engine>> engines;
    std::mutex left_mutex;
    std::exception_ptr left;     // by the last pager that has ended with one
    std::mutex asking_mutex;     // never held while Python runs
    PyObject* raiser = nullptr;  // nullptr: Python is not asked, or not any more
    std::atomic<bool> is_asked{false};
};

/// Never destroyed: threads of engines may outlive everything, and what is left is looked for last of all.
Unraised& unraised() {
    static Unraised* const errors = new Unraised;
    return *errors;
}

/// An engine that this becomes the last owner of ends after the lock.
std::vector<std::shared_ptr<Engine>> live_engines() {
    std::vector<std::shared_ptr<Engine>> live;
    const std::lock_guard lock(unraised().engines_mutex);
    for (const std::weak_ptr<Engine>& engine : unraised().engines) live.push_back(engine.lock());
    std::erase(live, nullptr);
    return live;
}

std::exception_ptr replace_left(std::exception_ptr error) noexcept {
    const std::lock_guard lock(unraised().left_mutex);
    return std::exchange(unraised().left, std::move(error));
}

/// Each error is raised to one caller, and once.
void raise_one() {
    if (const std::exception_ptr error = replace_left(nullptr)) std::rethrow_exception(error);
    for (const std::shared_ptr<Engine>& engine : live_engines()) engine->raise_fault_error();
}

/// False where Python would only print what is raised: between and in the functions that end it.
bool is_program_running() {
    PyFrameObject* const innermost = PyEval_GetFrame();
    const py::module_ threading = py::module_::import("threading");
    if (!innermost || !threading.attr("main_thread")().attr("is_alive")().cast<bool>()) return false;
    auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(innermost));
    for (py::object outer = frame.attr("f_back"); !outer.is_none(); outer = frame.attr("f_back")) frame = outer;
    return !frame.attr("f_globals").is(threading.attr("__dict__"));  // which waits for threads of the program
}

int raise_between_bytecodes(void*) noexcept;

/// Threads: any, with or without the GIL. Where Python's queue is full, the next pin or the exit has the error.
void ask_for_main_thread() noexcept {
    if (in_forked_child()) return;
    Unraised& errors = unraised();
    const std::lock_guard lock(errors.asking_mutex);
    if (!errors.raiser || errors.is_asked.exchange(true)) return;
    if (Py_AddPendingCall(&raise_between_bytecodes, nullptr) != 0) errors.is_asked.store(false);
}

/// By the main thread, which may be in a handler of a signal that interrupted it while it waits for the disk: it then
/// has pages, and none of the locks.
int raise_between_bytecodes(void*) noexcept {
    Unraised& errors = unraised();
    errors.is_asked.store(false);
    PyObject* const raiser = errors.raiser;  // changed by this thread only
    if (!raiser || in_forked_child()) return 0;
    PyObject* const result = PyObject_CallNoArgs(raiser);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

void leave(std::exception_ptr error) {
    if (in_forked_child()) return;
    replace_left(std::move(error));
    ask_for_main_thread();
}

void write_line(const std::string& line) noexcept {
    for (std::size_t done = 0; done < line.size();) {
        const ssize_t written = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
        if (written <= 0) return;  // there is nobody to read it
        done += static_cast<std::size_t>(written);
    }
}

/// Runs once everything else has: Python's exit functions in any order of theirs, its flushing and its end, then those
/// of C and the destructors of libraries. Only here does nobody else's work get lost when the process ends at once, and
/// only that changes a status that was given to exit().
[[gnu::destructor]] void end_with_what_nobody_raised() {
    if (in_forked_child()) return;
    try {
        raise_one();
    } catch (const std::exception& error) {
        write_line(
            concat("torch_offload: an access to paged memory outside of torch's operators got wrong bytes, and "
                   "the program ended before that could be raised: ",
                   error.what(), "\n"));
        std::fflush(nullptr);
        ::_exit(EXIT_FAILURE);
    }
}

}  // namespace

FaultNotice fault_notice() { return {&ask_for_main_thread, &leave}; }

void watch_faults(const std::shared_ptr<Engine>& engine) {
    std::vector<std::weak_ptr<Engine>>& engines = unraised().engines;
    const std::lock_guard lock(unraised().engines_mutex);
    std::erase_if(engines, [](const std::weak_ptr<Engine>& other) { return other.expired(); });
    engines.push_back(engine);
}

/// A function of Python's, so that errors are translated as everywhere.
void install_fault_raiser() {
    py::cpp_function raiser([] {
        if (is_program_running()) raise_one();
    });
    const std::lock_guard lock(unraised().asking_mutex);
    unraised().raiser = raiser.release().ptr();
}

void stop_raising_faults() {
    const std::lock_guard lock(unraised().asking_mutex);
    unraised().raiser = nullptr;
}

}  // namespace torch_offload
