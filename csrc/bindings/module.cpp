// The Python module `torch_offload._C`: arguments in, results out, the GIL given back while the engine waits.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/applied_gradient.h"
#include "autograd/engine.h"
#include "autograd/forked_child.h"
#include "autograd/gradient_buckets.h"
#include "autograd/gradient_hook.h"
#include "autograd/paged_storage.h"
#include "autograd/register_allocator.h"
#include "autograd/saved_tensor.h"
#include "base/check.h"
#include "bindings/activities.h"
#include "bindings/engine_dump.h"
#include "bindings/interrupts.h"
#include "bindings/log_queue.h"
#include "bindings/names.h"
#include "bindings/page_server.h"
#include "bindings/python_errors.h"
#include "bindings/ssd_probe.h"
#include "bindings/statistics.h"
#include "bindings/tier_options.h"
#include "bindings/unraised_errors.h"
#include "device/address_space_shared.h"
#include "pager/rank_wait.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

constexpr std::array kKinds = {
    Named<SegmentKind>{"parameter", SegmentKind::parameter}, Named<SegmentKind>{"gradient", SegmentKind::gradient},
    Named<SegmentKind>{"state", SegmentKind::state}, Named<SegmentKind>{"activation", SegmentKind::activation},
    Named<SegmentKind>{"other", SegmentKind::other}};

constexpr std::array kDevices = {Named<DeviceKind>{"emulated", DeviceKind::emulated},
                                 Named<DeviceKind>{"cuda", DeviceKind::cuda}};

/// The threads that would answer stayed with the parent, perhaps while they held a lock.
void refuse_in_forked_child() {
    OFFLOAD_CHECK(!in_forked_child(), OffloadError,
                  "an engine of the parent process cannot be used in a forked child; start it with the spawn method");
}

/// Runs `body` without the GIL, then hands collected log lines to Python. Refuses in a forked child.
template <typename Body>
auto waiting(Body body) {
    refuse_in_forked_child();
    struct Delivery {
        ~Delivery() noexcept(false) {
            if (std::uncaught_exceptions() == 0) deliver_log();
        }
    };
    const Delivery delivery;
    const py::gil_scoped_release no_gil;
    return body();
}

/// While `torch.func` transforms a function, what it calls is given tensors that stand for others.
bool in_transform() {
    return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

const std::shared_ptr<Segment>& managed_segment(const at::Tensor& tensor) {
    const std::shared_ptr<Segment>& segment = segment_of(tensor);
    OFFLOAD_CHECK(segment != nullptr, InvalidArgument, "the tensor is not managed by an engine");
    return segment;
}

// --- Pin ----------------------------------------------------------------------------------------------------------

/// Members are destroyed from the last to the first: the guard goes before the engine.
struct Pin {
    std::shared_ptr<Engine> engine;
    PinGuard guard;
    OpenStorages open;

    void release() {
        PinGuard dropped;
        dropped.swap(guard);
        OpenStorages closed;
        closed.swap(open);
    }
};

std::unique_ptr<Pin> make_pin(const at::Tensor& tensor, bool is_read_only) {
    const std::shared_ptr<Segment>& segment = managed_segment(tensor);
    Block& block = *block_of(tensor);
    const PinRequest request{segment, is_read_only ? Access::read : block.engine->bare_access()};
    check_has_bytes(block);
    block.is_raw_exposed.store(true);
    auto pin = std::make_unique<Pin>();
    pin->engine = block.engine;
    pin->guard = block.engine->pin({&request, 1});
    pin->guard.keep();
    pin->open.open(tensor);
    return pin;
}

std::unique_ptr<Pin> make_update_pin(const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
    std::optional<PinGuard> guard = hold_for_update(parameter, states);
    if (!guard) return nullptr;
    auto pin = std::make_unique<Pin>();
    pin->engine = block_of(parameter)->engine;
    pin->guard = std::move(*guard);
    return pin;
}

void bind_pin(py::module_& module) {
    py::class_<Pin>(module, "Pin", py::is_final())
        .def("__enter__", [](py::object self) { return self; })
        .def("__exit__", [](Pin& self, const py::args&) { self.release(); })
        .def("release", &Pin::release);
}

// --- Waits for other ranks ----------------------------------------------------------------------------------------

/// A context of Python. In a forked child, whose ranks are not the parent's, it does nothing.
struct RankWaitScope {
    std::shared_ptr<Engine> engine;
    std::optional<RankWait> wait;

    void enter() {
        if (!in_forked_child()) wait.emplace(engine->pager());
    }
};

void bind_rank_wait(py::module_& module) {
    py::class_<RankWaitScope>(module, "RankWait", py::is_final())
        .def("__enter__", &RankWaitScope::enter)
        .def("__exit__", [](RankWaitScope& self, const py::args&) { self.wait.reset(); });
}

// --- Buckets of gradients -----------------------------------------------------------------------------------------

/// A context of Python. In a forked child, whose pages are the parent's, it does nothing.
struct BucketContext {
    std::shared_ptr<Engine> engine;
    bool is_home = false;
    std::optional<BucketScope> scope;

    void enter() {
        if (!in_forked_child()) scope.emplace(engine, is_home);
    }
};

void bind_buckets(py::module_& module) {
    py::class_<BucketContext>(module, "PagedBuckets", py::is_final())
        .def("__enter__", &BucketContext::enter)
        .def("__exit__", [](BucketContext& self, const py::args&) { self.scope.reset(); });
}

// --- Engine -------------------------------------------------------------------------------------------------------

std::shared_ptr<Engine> make_engine(std::size_t budget_bytes, std::vector<std::string> directories,
                                    const std::string& io_engine, std::size_t queue_depth, std::size_t page_elements,
                                    std::size_t min_paged_bytes, std::size_t device_bytes, bool updates_on_host,
                                    bool activations_stay_on_host, double link_bytes_per_second,
                                    double ssd_bytes_per_second, const std::string& device_kind, int device_ordinal,
                                    int io_timeout, const std::vector<int>& retry_delays_ms, std::string remedy,
                                    const std::vector<std::uint64_t>& keep_free_bytes,
                                    std::optional<std::uint64_t> max_file_bytes, bool copies_checkpoints,
                                    std::shared_ptr<LedgerFile> ledger, std::size_t guaranteed_bytes,
                                    const std::vector<std::string>& stores) {
    EngineOptions options;
    options.ledger = std::move(ledger);
    options.guaranteed_bytes = guaranteed_bytes;
    options.scratch_limits = scratch_limits(keep_free_bytes, max_file_bytes);
    for (const std::string& address : stores) options.stores.push_back(NetAddress::parse(address));
    if (device_bytes > 0) {
        options.device = DeviceTier{.kind = value_named(kDevices, device_kind, "device_kind"),
                                    .budget_bytes = device_bytes,
                                    .updates_on_host = updates_on_host,
                                    .activations_stay_on_host = activations_stay_on_host,
                                    .emulated = {},
                                    .ordinal = device_ordinal};
        for (double& rate : options.device->emulated.bytes_per_second) rate = link_bytes_per_second;
    }
    options.ssd_bytes_per_second = ssd_bytes_per_second;
    options.pager.budget_bytes = budget_bytes;
    options.pager.directories = std::move(directories);
    options.pager.engine = value_named(kEngines, io_engine, "io_engine");
    options.pager.queue_depth = queue_depth;
    options.pager.page_elements = page_elements;
    options.pager.transfer_limits = transfer_limits(std::chrono::seconds(io_timeout), retry_delays_ms);
    options.pager.remedy = std::move(remedy);
    options.pager.fault_notice = fault_notice();
    options.min_paged_bytes = min_paged_bytes;
    options.copies_checkpoints = copies_checkpoints;
    std::shared_ptr<Engine> engine = waiting([&] { return Engine::make(options); });
    watch_faults(engine);
    return engine;
}

/// A parameter takes its gradient along.
void bring_module_tensor(Engine& engine, const at::Tensor& tensor, const SegmentRole& role) {
    bring_to_device(engine.shared_from_this(), tensor, role);
    if (!tensor.is_leaf() || !tensor.grad().defined()) return;
    bring_to_device(engine.shared_from_this(), tensor.grad(),
                    {SegmentKind::gradient, "gradient of " + role.label, kNoTrace, kNoTrace});
}

bool manage_tensor(Engine& engine, const at::Tensor& tensor, const std::string& kind, std::string label,
                   const std::optional<at::Tensor>& anchor, bool of_module) {
    SegmentRole role{value_named(kKinds, kind, "kind"), std::move(label), kNoTrace, kNoTrace};
    if (anchor && block_of(*anchor)) role.anchor_id = segment_of(*anchor)->trace_id;
    return waiting([&] {
        if (of_module) bring_module_tensor(engine, tensor, role);
        const bool is_new = !block_of(tensor);
        if (!is_new && role.anchor_id != kNoTrace) engine.pager().set_anchor(*segment_of(tensor), role.anchor_id);
        if (is_new && is_manageable(engine, tensor) && tensor.nbytes() >= engine.min_paged_bytes()) {
            role.trace_id = engine.pager().new_trace_id();
        }
        const bool is_managed = engine.try_manage(tensor, std::move(role));
        if (is_managed && is_new) note_heap_freed(tensor.nbytes());
        return is_managed;
    });
}

void unmanage_tensor(Engine& engine, const at::Tensor& tensor) {
    waiting([&] {
        if (const std::shared_ptr<Segment> segment = segment_of(tensor)) engine.deferred().force(segment);
        unmanage(tensor);
        bring_to_host(engine, tensor);
    });
}

std::size_t evict_tensor(Engine& engine, const at::Tensor& tensor) {
    return waiting([&] {
        engine.sweep_leases();
        return engine.pager().evict(managed_segment(tensor));
    });
}

void expect_pass(Engine& engine, ProgramId program, const std::vector<at::Tensor>& tensors) {
    waiting([&] {
        std::vector<std::shared_ptr<Segment>> segments;
        segments.reserve(tensors.size());
        for (const at::Tensor& tensor : tensors) {
            if (block_of(tensor)) segments.push_back(segment_of(tensor));
        }
        engine.expect_pass(program, segments);
    });
}

void flush_engine(Engine& engine) {
    waiting([&] {
        engine.deferred().force_all();
        engine.flush_pages();
    });
}

/// Of a budget that the processes of a launch on one machine share.
void bind_ledger(py::module_& module) {
    py::class_<LedgerFile, std::shared_ptr<LedgerFile>>(module, "BudgetLedger", py::is_final())
        .def_static("make", &LedgerFile::make, py::kw_only(), py::arg("name"), py::arg("budget_bytes"),
                    py::arg("rank_count"))
        .def_static("open", &LedgerFile::open, py::arg("path"))
        .def_property_readonly("budget_bytes", [](LedgerFile& self) { return self.page().budget_bytes(); })
        .def_property_readonly("equal_bytes", [](LedgerFile& self) { return self.page().equal_bytes(); });
}

using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;

EngineClass make_engine_class(py::module_& module) {
    EngineClass engine(module, "Engine", py::is_final());
    engine
        .def(py::init(&make_engine), py::kw_only(), py::arg("budget_bytes"), py::arg("directories"),
             py::arg("io_engine"), py::arg("queue_depth"), py::arg("page_elements"), py::arg("min_paged_bytes"),
             py::arg("device_bytes") = 0, py::arg("updates_on_host") = false,
             py::arg("activations_stay_on_host") = false, py::arg("link_bytes_per_second") = 0.0,
             py::arg("ssd_bytes_per_second") = 0.0, py::arg("device_kind") = "emulated", py::arg("device_ordinal") = 0,
             py::arg("io_timeout") = 120, py::arg("retry_delays_ms") = std::vector<int>{10, 100, 1'000, 5'000},
             py::arg("remedy") = "", py::arg("keep_free_bytes") = std::vector<std::uint64_t>(),
             py::arg("max_file_bytes") = py::none(), py::arg("copies_checkpoints") = false,
             py::arg("ledger") = py::none(), py::arg("guaranteed_bytes") = 0,
             py::arg("stores") = std::vector<std::string>{})
        .def_property_readonly("torch_device", [](const Engine& self) { return py::cast(self.torch_device().str()); })
        .def("statistics",
             [](Engine& self) {
                 refuse_in_forked_child();
                 deliver_log();
                 return statistics_of(self);
             })
        .def("dump",
             [](Engine& self) {
                 refuse_in_forked_child();
                 return dump_of(self);
             })
        .def("start_use_log", [](Engine& self) { self.pager().start_use_log(); })
        .def("take_use_log", [](Engine& self) { return uses_of(self); })
        .def(
            "start_activity_log", [](Engine& self, std::size_t capacity) { self.activity_log().start(capacity); },
            py::arg("capacity"))
        .def("activity_log", &activities_of)
        .def("managed_count", &Engine::live_segments)
        .def("waits_for_ranks",
             [](Engine& self) { return std::make_unique<RankWaitScope>(self.shared_from_this(), std::nullopt); });
    return engine;
}

void bind_gradients(EngineClass& engine) {
    engine
        .def(
            "gradient_complete",
            [](Engine&, const at::Tensor& parameter, const std::optional<at::Tensor>& gradient) {
                waiting([&] { gradient_complete(parameter, gradient ? *gradient : parameter.grad()); });
            },
            py::arg("parameter"), py::arg("gradient") = std::nullopt)
        .def(
            "hold_for_update",
            [](Engine&, const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
                return waiting([&] { return make_update_pin(parameter, states); });
            },
            py::arg("parameter"), py::arg("states"))
        .def(
            "gradient_applied",
            [](Engine&, const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
                waiting([&] { gradient_applied(parameter, states); });
            },
            py::arg("parameter"), py::arg("states"));
}

void bind_engine(py::module_& module) {
    EngineClass engine = make_engine_class(module);
    bind_gradients(engine);
    engine.def("install_allocator", [](Engine& self) { RegisterAllocator::process().install(self.shared_from_this()); })
        .def("remove_allocator", [](Engine& self) { RegisterAllocator::process().remove(self); })
        .def("manage", &manage_tensor, py::arg("tensor"), py::kw_only(), py::arg("kind"), py::arg("label"),
             py::arg("anchor") = py::none(), py::arg("of_module") = false)
        .def("unmanage", &unmanage_tensor, py::arg("tensor"))
        .def(
            "keep_out", [](Engine& self, const at::Tensor& tensor) { self.kept_out().add(tensor.storage()); },
            py::arg("tensor"))
        .def(
            "save_for_backward",
            [](const std::shared_ptr<Engine>& self, const at::Tensor& tensor) {
                return waiting([&] { return save_for_backward(self, tensor); });
            },
            py::arg("tensor"))
        .def(
            "pages_buckets",
            [](Engine& self, bool holds_gradients) {
                return std::make_unique<BucketContext>(self.shared_from_this(), holds_gradients, std::nullopt);
            },
            py::kw_only(), py::arg("holds_gradients"))
        .def("forget_buckets", [](Engine& self) { waiting([&] { self.buckets().forget(); }); })
        .def("release_buckets", [](Engine& self) { waiting([&] { self.buckets().release(); }); })
        .def("end_saving", [](Engine& self) { waiting([&] { self.drop_kept(); }); })
        .def("begin_optimizer_step", [](Engine& self) { waiting([&] { self.begin_optimizer_step(); }); })
        .def("abandon_optimizer_step", &Engine::abandon_optimizer_step)
        .def("expect_pass", &expect_pass, py::arg("program"), py::arg("tensors"))
        .def("begin_pass", &Engine::begin_pass, py::call_guard<py::gil_scoped_release>())
        .def("end_optimizer_step", [](Engine& self) { waiting([&] { self.end_optimizer_step(); }); })
        .def("finish_loading", [](Engine& self) { waiting([&] { self.finish_loading(); }); })
        .def("evict", &evict_tensor, py::arg("tensor"))
        .def(
            "prefetch",
            [](Engine& self, const at::Tensor& tensor) {
                waiting([&] { self.pager().prefetch(managed_segment(tensor)); });
            },
            py::arg("tensor"))
        .def(
            "pin",
            [](Engine&, const at::Tensor& tensor, bool is_read_only) {
                return waiting([&] { return make_pin(tensor, is_read_only); });
            },
            py::arg("tensor"), py::kw_only(), py::arg("read_only") = false)
        .def(
            "lease",
            [](Engine&, const at::Tensor& view) {
                waiting([&] {
                    managed_segment(view);
                    check_has_bytes(*block_of(view));
                    block_of(view)->engine->lease(view);
                });
            },
            py::arg("view"))
        .def(
            "is_resident",
            [](Engine& self, const at::Tensor& tensor) { return self.pager().is_resident(*managed_segment(tensor)); },
            py::arg("tensor"))
        .def(
            "has_pending_work",
            [](Engine& self, const at::Tensor& tensor) {
                refuse_in_forked_child();
                return self.deferred().has_work(*managed_segment(tensor));
            },
            py::arg("tensor"))
        .def("flush", &flush_engine);
}

/// Engines that nothing uses any more stop their threads while the interpreter is still there to be stopped beside.
void remove_allocator_at_exit() {
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
        if (in_forked_child()) return;  // a thread of the parent may have held a lock of the engine's
        stop_raising_faults();
        RegisterAllocator::process().remove_any();
        deliver_log();
    }));
}

}  // namespace
}  // namespace torch_offload

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace torch_offload;
    install_error_translation();
    install_interrupt_check();
    install_fault_raiser();
    m.attr("built_against_torch") = TORCH_OFFLOAD_BUILT_AGAINST;
#ifdef TORCH_OFFLOAD_HAVE_LIBURING
    m.attr("has_liburing") = true;
#else
    m.attr("has_liburing") = false;
#endif
#ifdef TORCH_OFFLOAD_CUDA
    m.attr("built_with_cuda") = true;
    m.attr("cuda_architectures") = py::make_tuple(TORCH_OFFLOAD_CUDA_ARCHITECTURES);
#else
    m.attr("built_with_cuda") = false;
    m.attr("cuda_architectures") = py::make_tuple();
#endif
    m.def("set_log_level", &collect_log, py::arg("level"));
    m.def(
        "is_managed", [](const at::Tensor& tensor) { return has_paged_keys(tensor) && block_of(tensor) != nullptr; },
        py::arg("tensor"));
    bind_pin(m);
    bind_rank_wait(m);
    bind_buckets(m);
    bind_activities(m);
    bind_ledger(m);
    bind_engine(m);
    bind_ssd_probe(m);
    bind_page_server(m);
    py::class_<SavedTensor>(m, "SavedTensor", py::is_final());
    m.def("restore_for_backward", &restore_for_backward, py::arg("saved"));
    m.def("may_hook_saved_tensors", &may_hook_saved_tensors);
    m.def("saved_tensor_hook_count", &saved_tensor_hook_count);
    m.def("in_transform", &in_transform);
    m.def("in_backward", [] { return torch::autograd::get_current_graph_task_id() != -1; });
    m.def("is_applied", &is_applied, py::arg("gradient"));
    m.def("has_storage", [](const at::Tensor& tensor) { return tensor.has_storage(); }, py::arg("tensor"));
    m.def(
        "engine_of_storage",
        [](const py::object& storage) -> std::optional<std::pair<std::shared_ptr<Engine>, at::Tensor>> {
            const at::Storage unpacked = torch::createStorage(storage.ptr());
            const Block* block = block_of(*unpacked.unsafeGetStorageImpl());
            if (!block) return std::nullopt;
            return std::make_pair(block->engine, bytes_over(unpacked));
        },
        py::arg("storage"));
    m.def(
        "address_of",
        [](const at::Tensor& tensor) {
            return reinterpret_cast<std::uintptr_t>(managed_segment(tensor)->range().data());
        },
        py::arg("tensor"));
    m.def(
        "engine_of",
        [](const at::Tensor& tensor) -> std::shared_ptr<Engine> {
            const Block* block = block_of(tensor);
            return block ? block->engine : nullptr;
        },
        py::arg("tensor"));
    remove_allocator_at_exit();
}
