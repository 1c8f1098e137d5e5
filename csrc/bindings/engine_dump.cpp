#include "bindings/engine_dump.h"

#include <array>
#include <chrono>
#include <optional>
#include <string>

#include "bindings/statistics.h"
#include "pager/pager_dump.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

constexpr std::array<const char*, kPageStateCount> kStateNames = {"zero", "stored", "loading",  "loaded",
                                                                  "busy", "mapped", "evicting", "failed"};

/// Labels and names of threads are whatever somebody chose.
py::str text_of(const std::string& text) {
    auto decoded = py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
    if (!decoded) throw py::error_already_set();
    return decoded;
}

py::dict pages_of(const PageCounts& counts) {
    py::dict by_state;
    for (std::size_t state = 0; state < kPageStateCount; ++state) by_state[kStateNames[state]] = counts.by_state[state];
    py::dict result;
    result["by_state"] = by_state;
    result["pinned"] = counts.pinned;
    result["dirty"] = counts.dirty;
    result["pending"] = counts.pending;
    result["failed_transfer"] = counts.failed_transfer;
    return result;
}

py::dict wait_of(const ThreadWait& thread) {
    py::dict result;
    result["cause"] = cause_name(thread.wait.cause);
    result["thread_id"] = thread.wait.thread_id;
    result["thread_name"] = text_of(thread.thread_name);
    result["seconds"] = std::chrono::duration<double>(thread.wait.age).count();
    result["page"] = text_of(thread.wait.page);
    return result;
}

py::dict as_dict(const PagerDump& dump) {
    py::list waits;
    for (const ThreadWait& wait : dump.waits) waits.append(wait_of(wait));
    py::list transfers;
    for (const std::string& transfer : dump.transfers) transfers.append(text_of(transfer));
    py::dict result;
    result["pages"] = dump.has_locked_part ? py::object(pages_of(dump.pages)) : py::none();
    result["memory"] = dump.has_locked_part ? py::object(memory_of(dump.memory)) : py::none();
    result["moving_pages"] = dump.moving_pages;
    result["late_pages"] = dump.late_pages;
    result["memory_waiters"] = dump.memory_waiters;
    result["program_waiters"] = dump.program_waiters;
    result["transients"] = dump.transients;
    result["uses_in_flight"] = dump.uses_in_flight;
    result["waits"] = waits;
    result["transfers"] = transfers;
    return result;
}

}  // namespace

py::dict dump_of(Engine& engine) {
    PagerDump host;
    std::optional<PagerDump> device;
    {
        const py::gil_scoped_release no_gil;
        host = engine.host_pager().dump();
        if (engine.has_device()) device = engine.pager().dump();
    }
    py::dict result;
    result["host"] = as_dict(host);
    if (device) result["device"] = as_dict(*device);
    return result;
}

}  // namespace torch_offload
