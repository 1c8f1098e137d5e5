#include "bindings/page_server.h"

#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "autograd/encoded_work.h"
#include "bindings/log_queue.h"
#include "bindings/names.h"
#include "bindings/statistics.h"
#include "bindings/tier_options.h"
#include "pager/page_server.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

/// `close()` leaves nothing.
struct ServerHold {
    std::unique_ptr<PageServer> server;

    PageServer& get() const {
        OFFLOAD_CHECK(server, OffloadError, "the store is closed");
        return *server;
    }
};

ServerHold make_server(const std::string& listen, std::size_t budget_bytes, std::vector<std::string> directories,
                       const std::string& io_engine, std::size_t queue_depth, int io_timeout,
                       const std::vector<int>& retry_delays_ms, const std::vector<std::uint64_t>& keep_free_bytes,
                       std::optional<std::uint64_t> max_file_bytes, bool runs_updates) {
    PageServerOptions options{
        NetAddress::parse(listen), {}, scratch_limits(keep_free_bytes, max_file_bytes), nullptr, kernels_here()};
    if (runs_updates) options.run_work = &run_encoded_work;
    options.pager.budget_bytes = budget_bytes;
    options.pager.directories = std::move(directories);
    options.pager.engine = value_named(kEngines, io_engine, "io_engine");
    options.pager.queue_depth = queue_depth;
    options.pager.transfer_limits = transfer_limits(std::chrono::seconds(io_timeout), retry_delays_ms);
    const py::gil_scoped_release no_gil;
    return {std::make_unique<PageServer>(options)};
}

std::uint64_t total_of(std::span<const std::uint64_t> by_kind) {
    return std::accumulate(by_kind.begin(), by_kind.end(), std::uint64_t{0});
}

py::dict statistics_of_server(const ServerHold& hold) {
    deliver_log();
    PageServerStatistics figures;
    {
        const py::gil_scoped_release no_gil;
        figures = hold.get().statistics();
    }
    py::dict result;
    result["clients"] = figures.clients;
    result["clients_so_far"] = figures.clients_so_far;
    result["segments"] = figures.segments;
    result["received_bytes"] = figures.received_bytes;
    result["sent_bytes"] = figures.sent_bytes;
    result["damaged_bytes"] = figures.damaged_bytes;
    result["peak_lent_bytes"] = figures.peak_lent_bytes;
    result["updates"] = figures.updates;
    result["update_bytes"] = figures.update_bytes;
    result["memory"] = memory_of(figures.pager.memory);
    result["stored_bytes"] = figures.pager.store.stored_bytes;
    result["file_bytes"] = figures.pager.store.file_bytes;
    result["ssd_read_bytes"] = total_of(figures.pager.read_bytes);
    result["ssd_written_bytes"] = total_of(figures.pager.written_bytes);
    return result;
}

void close_server(ServerHold& hold) {
    {
        const py::gil_scoped_release no_gil;
        hold.server.reset();
    }
    deliver_log();
}

}  // namespace

void bind_page_server(py::module_& module) {
    py::class_<ServerHold>(module, "PageServer", py::is_final())
        .def(py::init(&make_server), py::kw_only(), py::arg("listen"), py::arg("budget_bytes"), py::arg("directories"),
             py::arg("io_engine"), py::arg("queue_depth"), py::arg("io_timeout"),
             py::arg("retry_delays_ms") = std::vector<int>{10, 100, 1'000, 5'000},
             py::arg("keep_free_bytes") = std::vector<std::uint64_t>(), py::arg("max_file_bytes") = py::none(),
             py::arg("runs_updates") = true)
        .def_property_readonly("address", [](const ServerHold& self) { return self.get().address().text(); })
        .def("statistics", &statistics_of_server)
        .def("close", &close_server);
}

}  // namespace torch_offload
