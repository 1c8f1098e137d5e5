#include "bindings/ssd_probe.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/names.h"
#include "device/address_space_advice.h"
#include "storage/ssd_probe.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

constexpr std::array kPatterns = {Named<SsdPattern>{"read", SsdPattern::read},
                                  Named<SsdPattern>{"write", SsdPattern::write},
                                  Named<SsdPattern>{"mix", SsdPattern::mix}};

std::unique_ptr<SsdProbe> make_probe(std::string directory, const std::string& io_engine, std::size_t file_bytes,
                                     std::size_t block_bytes, std::size_t max_depth) {
    const SsdProbeOptions options{.directory = std::move(directory),
                                  .engine = value_named(kEngines, io_engine, "io_engine"),
                                  .block_bytes = block_bytes,
                                  .file_bytes = file_bytes,
                                  .max_depth = max_depth,
                                  .prepare_memory = &advise_huge_pages};
    const py::gil_scoped_release no_gil;
    return std::make_unique<SsdProbe>(options);
}

py::dict measure(SsdProbe& probe, const std::string& pattern, std::size_t depth, double seconds) {
    OFFLOAD_CHECK(seconds >= 0 && seconds <= 3600, InvalidArgument, "seconds must be 0 to 3600, got ", seconds);
    const std::chrono::duration<double> duration(seconds);
    const SsdLoad load{value_named(kPatterns, pattern, "pattern"), depth,
                       std::chrono::duration_cast<std::chrono::milliseconds>(duration)};
    SsdBandwidth bandwidth;
    {
        const py::gil_scoped_release no_gil;
        bandwidth = probe.measure(load);
    }
    py::dict result;
    result["read_bytes"] = bandwidth.read_bytes;
    result["written_bytes"] = bandwidth.written_bytes;
    result["seconds"] = bandwidth.seconds;
    return result;
}

std::optional<std::string> io_engine_refusal(const std::string& io_engine) {
    const IoEngineKind kind = value_named(kEngines, io_engine, "io_engine");
    const py::gil_scoped_release no_gil;
    try {
        make_io_engine(kind, 1);
        return std::nullopt;
    } catch (const InvalidArgument& reason) {
        return reason.what();
    }
}

}  // namespace

void bind_ssd_probe(py::module_& module) {
    py::class_<SsdProbe>(module, "SsdProbe", py::is_final())
        .def(py::init(&make_probe), py::kw_only(), py::arg("directory"), py::arg("io_engine"), py::arg("file_bytes"),
             py::arg("block_bytes"), py::arg("max_depth"))
        .def("measure", &measure, py::kw_only(), py::arg("pattern"), py::arg("depth"), py::arg("seconds"))
        .def_property_readonly("engine_name", &SsdProbe::engine_name)
        .def_property_readonly("file_bytes", &SsdProbe::file_bytes)
        .def_property_readonly("is_direct", &SsdProbe::is_direct);
    module.def("io_engine_refusal", &io_engine_refusal, py::arg("io_engine"));
}

}  // namespace torch_offload
