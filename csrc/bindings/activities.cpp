#include "bindings/activities.h"

#include <array>

namespace py = pybind11;

namespace torch_offload {
namespace {

constexpr std::array<const char*, kActivityLaneCount> kLaneNames = {
    "ssd_read",   "ssd_write",    "to_device",    "to_host",     "update",       "optimizer_step",
    "stall_read", "stall_memory", "stall_update", "stall_fault", "stall_network"};

py::tuple as_tuple(const Activity& activity) {
    const std::string_view label = activity.label();
    // A label that lost its beginning may start in the middle of a character.
    const auto text = py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(label.data(), static_cast<Py_ssize_t>(label.size()), "replace"));
    if (!text) throw py::error_already_set();
    return py::make_tuple(kLaneNames[static_cast<std::size_t>(activity.lane)], activity.thread_id, activity.begin_ns,
                          activity.end_ns, activity.size_bytes, text);
}

py::list as_list(const ActivityRecord& record) {
    py::list result;
    for (const Activity& activity : record.activities) result.append(as_tuple(activity));
    return result;
}

}  // namespace

void bind_activities(py::module_& module) {
    py::class_<ActivityRecord>(module, "ActivityRecord", py::is_final())
        .def_readonly("begin_ns", &ActivityRecord::begin_ns)
        .def_readonly("end_ns", &ActivityRecord::end_ns)
        .def_readonly("dropped_count", &ActivityRecord::dropped_count)
        .def("activities", &as_list);
}

std::optional<ActivityRecord> activities_of(Engine& engine) {
    if (!engine.activity_log().is_on()) return std::nullopt;
    return engine.activity_log().copy();
}

}  // namespace torch_offload
