"""The engine of this process and what is installed while there is one.

Modules that are wrapped together share its budget. A session opens with the first wrapped module. It closes when
nothing is paged any more, and puts back every function that it replaced.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torch_offload import _C
from torch_offload._compat import paged_part
from torch_offload.activations.paging import PagedActivations
from torch_offload.activations.policy import ActivationPolicy
from torch_offload.config import Activations, Config
from torch_offload.errors import ConfigError, OffloadError
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.hooks.registrations import Listener, Listening, Registrations
from torch_offload.reporting.prediction import Prediction
from torch_offload.reporting.report import Report
from torch_offload.reporting.timeline import Timeline
from torch_offload.runtime import (
    compared_addresses,
    data_parallel,
    rank_waits,
    raw_access,
    transformers_loading,
    transformers_saving,
)
from torch_offload.runtime.backward_updates import BackwardUpdates
from torch_offload.runtime.eligibility import check_engine
from torch_offload.runtime.full_states import FullStates
from torch_offload.runtime.node_budget import JoinedBudget, NodeBudget
from torch_offload.runtime.optimizer_hooks import OptimizerHooks
from torch_offload.runtime.passes import Passes
from torch_offload.runtime.pending_modules import PendingModules
from torch_offload.runtime.provisional_layers import ProvisionalLayers
from torch_offload.runtime.rank_agreement import RankAgreement
from torch_offload.runtime.sharded_parameters import ShardedParameters
from torch_offload.runtime.tensor_parts import all_parts_of, parts_beside
from torch_offload.runtime.tracked_module import WrappedModule
from torch_offload.runtime.unpickling import UnpickledTensors
from torch_offload.system import environment, gpu, resources

logger = logging.getLogger(__name__)

TRACE_CAPACITY = 1 << 18
"""Activities that are recorded for a trace: 22 MiB outside of the budget."""

_KEEP_ON_CPU = (
    "to page it through the GPU give its memory, such as gpu='24GiB'; to train on the CPU leave the move out "
    "(TrainingArguments(use_cpu=True))"
)
_LET_LEAVE = ", lower the batch size, or let activations leave memory (activations='page')"
_RECOMPUTE = ", lower the batch size, or recompute layers (activations='recompute')"
REMEDIES: Mapping[Activations, str] = MappingProxyType(
    {
        "keep": _LET_LEAVE,
        "ram": _LET_LEAVE,
        "page": _RECOMPUTE,
        "auto": _RECOMPUTE,
        "recompute": " or lower the batch size",
    }
)
"""Remedies beside a larger budget, by the setting for activations."""

PAGED_KEYS = ("DeferredInit", "CustomRNGKeyId")
"""The dispatch keys of paged tensors, as torch names them."""

_UNWRAP_FIRST = "call torch_offload.unwrap(module) before"


class Session:
    """One engine, the modules it pages, and the hooks and replacements that live as long.

    Threads: opening, closing and wrapping, one at a time; hooks run where torch calls them.

    Attributes:
        config: Its settings, each decided; of a budget that processes share, ``ram`` is this one's part.
        most_ram_bytes: The most memory that it can ever have.
        activations: Pages what autograd saves, None where it stays in memory.
        allocator_users: How many asked for its allocator alone, and were not closed.
    """

    def __init__(
        self,
        config: Config,
        registrations: Registrations,
        provisional: ProvisionalLayers,
        node: NodeBudget | None = None,
    ) -> None:
        """Start an engine.

        Args:
            config: With ``ram`` and ``ssd`` decided.
            registrations: Torch's hooks on registration.
            provisional: Dense layers that will be replaced.
            node: Of which ``ram`` is a part; None: it is this process's alone.

        Raises:
            ConfigError: If the file of a plan is none.
            OffloadError: If the budget or the directory cannot be used; nothing stays installed.
        """
        if config.uses_cuda:
            gpu.check_room(config.compute_bytes + config.reserved_bytes, torch.device("cuda", gpu.current()))
        self._prediction = None if config.plan is None else Prediction.of_plan(config.plan)
        self._registrations = registrations
        joined, self.engine = _engine_in(node, config)
        self.config = config = config if joined is None else config.replace(ram=joined.part_bytes)
        self.most_ram_bytes = (config.ram or 0) if joined is None else joined.budget_bytes
        if config.trace:
            self.engine.start_activity_log(TRACE_CAPACITY)
        self._wrapped: weakref.WeakKeyDictionary[nn.Module, WrappedModule] = weakref.WeakKeyDictionary()
        self._owners: weakref.WeakKeyDictionary[nn.Module, tuple[WrappedModule, str]] = weakref.WeakKeyDictionary()
        self._patches = Patches()
        self._sharded = ShardedParameters(
            self.engine,
            self._patches,
            config=config,
            label_of=self._label_of,
        )
        self._full_states = FullStates(self.engine, self._patches)
        self._hooks: list[RemovableHandle | Listening] = []
        self._knows_transformers = False
        self._unpickled = UnpickledTensors(self.engine, budget_bytes=config.compute_bytes)
        self.updates = BackwardUpdates(self.engine) if config.update == "backward" else None
        self._steps = OptimizerHooks(
            self.engine, self._unpickled, refresh=self._refresh, label_of=self._label_of, updates=self.updates
        )
        self._passes = Passes(self.engine)
        self._agreement = RankAgreement(budget_bytes=config.compute_bytes)
        self.activations = PagedActivations(self.engine) if config.pages_activations else None
        self.activation_policy = self._activation_policy_of()
        self.pending = PendingModules(self.engine, config, provisional)
        self.allocator_users = 0
        self._until_closed = ExitStack()
        if joined is not None:
            self._until_closed.callback(joined.close)
        try:
            self._install()
        except BaseException:
            self.close()
            raise
        places = ", ".join(config.stores or map(str, config.directories_of(environment.local_rank())))
        logger.info("engine with a budget of %d bytes and pages in %s", config.ram, places)

    def _install(self) -> None:
        raw_access.install(
            self._patches, budget_bytes=self.config.compute_bytes, check=self._steps.check_steps_are_whole
        )
        self._unpickled.install(self._patches)
        self._patches.replace(replaced_functions.MODULE_APPLY, self._after_conversion)
        self._patches.replace(replaced_functions.PARAMETER_DEEPCOPY, self._after_copy)
        self._patches.replace(replaced_functions.SWAP_TENSORS, self._swapped)
        data_parallel.broadcast_in_small_pieces(self._patches)
        data_parallel.page_buckets(self._patches, self.engine)
        rank_waits.note_waits(self._patches, self.engine)
        self._sharded.install()
        self._full_states.install()
        if self.activations is not None:
            self._patches.replace(replaced_functions.FORBID_SAVED_TENSOR_HOOKS, self.activations.stand_aside)
            self._patches.replace(replaced_functions.ALLOW_SAVED_TENSOR_HOOKS, self.activations.come_back)
        self._patches.replace(replaced_functions.HIGHER_ORDER_KEYS, _keys_of_higher_order)
        self._hooks = [
            self._registrations.listen(Listener(self.on_tensor, self._on_submodule_added)),
            *self._steps.install(self._patches),
            register_optimizer_step_post_hook(self._end_step),
        ]
        if self.engine.torch_device == "cpu":
            self.engine.install_allocator()
        else:
            compared_addresses.install(self._patches)
            self._until_closed.callback(
                gpu.cap_memory(self.config.reserved_bytes, torch.device(self.engine.torch_device))
            )

    def _activation_policy_of(self) -> ActivationPolicy | None:
        if self.config.activations not in ("auto", "recompute"):
            return None
        return ActivationPolicy(self.engine.statistics, recompute_all=self.config.activations == "recompute")

    def _begin_forward(self, wrapped: WrappedModule, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._steps.abandon_raised()
        self._check_stepped(wrapped)
        self._passes.begin_forward(wrapped, arguments, options)
        self._agreement.begin_forward()

    def _check_stepped(self, wrapped: WrappedModule) -> None:
        """Refuse to run a module that a backward has updated before the step; checkpointing runs it in the backward."""
        if self.updates is None or _C.in_backward():
            return
        if any(wrapped.label_of(parameter) is not None for parameter in self.updates.updated_parameters()):
            self.updates.check_stepped()

    def _end_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._passes.end_step()
        self._agreement.end_step()
        if self.activation_policy is not None:
            self.activation_policy.end_step()

    # --- modules ---------------------------------------------------------------------------------------------------
    def is_wrapped(self, module: nn.Module) -> bool:
        """Whether this very module was wrapped, as opposed to one that contains it."""
        return module in self._wrapped

    def is_part(self, module: nn.Module) -> bool:
        """Whether the module is known as a part of a wrapped one."""
        return module in self._owners

    def add(self, module: nn.Module, *, is_called: bool = False) -> None:
        """Page the module's tensors, all or none.

        Args:
            module: To wrap.
            is_called: A global forward pre-hook of the module calls this. Torch has collected the hooks of this call
                by then: it runs the forward hooks added here, and not the forward pre-hooks.

        Raises:
            ConfigError: If a part of it is on a GPU that has no pages.
            OffloadError: As from ``Engine.manage``. What had been paged is ordinary memory again.
            UnsupportedModelError: As from :func:`check_engine`.
        """
        check_engine(module, module.parameters())
        if self.config.uses_cuda:
            self._refuse_other_gpus(module)
        before = {id(tensor) for tensor in _tensors_in(module) if _C.is_managed(tensor)}
        wrapped = self._wrapped[module] = WrappedModule(
            module,
            self.engine,
            on_submodule=self._record_part,
            on_forward=self._begin_forward,
            activations=self.activations,
            updates=self.updates,
            sharded=self._sharded,
        )
        self._steps.unsettle()
        self._prepare_transformers()
        try:
            wrapped.scan()
            if self.activation_policy is not None:
                self.activation_policy.follow(module)
        except BaseException:
            self._forget(module)
            for _, tensor in wrapped.tensors():
                if id(tensor) not in before:
                    self._release(tensor.grad)
                    self._release(tensor)
            raise
        finally:
            self.engine.finish_loading()
        if self.config.uses_cuda:
            gpu.give_back_cache()
        if is_called and self.activations is not None:
            self.activations.enter()

    def _refuse_other_gpus(self, module: nn.Module) -> None:
        pages_on = torch.device(self.engine.torch_device)
        for name, tensor in all_parts_of([*module.named_parameters(), *module.named_buffers()]):
            if tensor.device.type == pages_on.type and tensor.device != pages_on:
                raise ConfigError(
                    f"gpu: {name} is on {tensor.device}, and pages are on {pages_on}; bring the module to the CPU or "
                    f"to {pages_on} before it is wrapped, or call torch.cuda.set_device({tensor.device.index}) before "
                    "the first one is"
                )

    def remove(self, module: nn.Module) -> None:
        """Make everything of the module ordinary memory, except what another wrapped module shares.

        Raises:
            OffloadError: If bytes cannot be brought back. All others have been, the log names those that were not; the
                module stays wrapped and the call can be repeated.
            RuntimeError: The same, where torch found the device lost.
        """
        failures: list[OffloadError | RuntimeError] = []  # the latter from torch, about a lost device
        try:
            self.engine.flush()
        except OffloadError as error:
            failures.append(error)
        wrapped = self._wrapped[module]
        wrapped.mark_stale()
        wrapped.refresh()
        shared = {
            tensor.untyped_storage().data_ptr()
            for other, tensors in self._wrapped.items()
            if other is not module
            for _, tensor in tensors.tensors()
            if _C.is_managed(tensor)
        }
        try:
            for label, tensor in wrapped.tensors():
                if not self._is_ours(tensor) or tensor.untyped_storage().data_ptr() in shared:
                    continue
                parameter = wrapped.parameter_of(tensor)
                if parameter.grad is not None and _C.is_applied(parameter.grad):
                    parameter.grad = None
                for part in (*self._steps.states_of(parameter), parameter.grad, tensor):
                    try:
                        self._release(part)
                    except (OffloadError, RuntimeError) as error:
                        logger.error("%s stays paged: %s", label, error)
                        failures.append(error)
        finally:
            self.engine.finish_loading()
        if failures:
            raise failures[0]
        wrapped.release_shards()
        self._forget(module)
        if not self._wrapped:
            self.engine.release_buckets()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield label and tensor of everything tracked, over all wrapped modules."""
        for wrapped in list(self._wrapped.values()):
            yield from wrapped.tensors()

    def tensors_of(self, module: nn.Module) -> list[torch.Tensor]:
        """Return what is paged for a module or a part of one: parameters, buffers, gradients, optimizer states."""
        found = _tensors_in(module)
        for parameter in list(module.parameters()):
            found += [] if parameter.grad is None else [paged_part(parameter.grad)]
            found += self._steps.states_of(parameter)
        return [tensor for tensor in found if _C.is_managed(tensor) and not _C.is_applied(tensor)]

    def modules(self) -> list[nn.Module]:
        """Return the wrapped modules."""
        return list(self._wrapped)

    def is_idle(self) -> bool:
        """Whether nothing is being loaded, nobody asked for its allocator alone, and neither a wrapped module nor one
        to be wrapped is alive.
        """
        return not self._wrapped and self.pending.is_idle() and self.allocator_users == 0

    def statistics(self) -> dict[str, Any]:
        """Return the figures of the engine."""
        return self.engine.statistics()

    def dump(self) -> dict[str, Any]:
        """Return what the engine does at this moment."""
        return self.engine.dump()

    def report(self, timeline: Timeline | None = None) -> Report:
        """Return the figures of the engine so far, with what was recorded of it."""
        statistics: dict[str, Any] = self.engine.statistics()
        if "device" in statistics:
            statistics["device"]["updates_on"] = self.config.optimizer_device
        choice = None if self.activation_policy is None else self.activation_policy.choice
        return Report.from_statistics(
            statistics,
            timeline=timeline,
            activations=choice,
            prediction=self._prediction,
            rank=environment.rank(),
            activities=self.engine.activity_log(),
        )

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the session closes, the last one first."""
        self._until_closed.callback(undo)

    def has_pages(self) -> bool:
        """Whether tensors are paged, those that outlived their module included."""
        return self.engine.managed_count() > 0

    def close(self) -> None:
        """Give back what was replaced. Tensors that are still paged stay usable. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module in list(self._wrapped):
            self._forget(module)
        self._sharded.remove()
        self._full_states.remove()
        self._patches.undo()
        self.engine.remove_allocator()
        self._until_closed.close()

    def _record_part(self, wrapped: WrappedModule, part: nn.Module, path: str) -> None:
        self._owners[part] = (wrapped, path)
        self.pending.leave(part)

    def _forget(self, module: nn.Module) -> None:
        wrapped = self._wrapped.pop(module)
        wrapped.remove_hooks()
        if self.activation_policy is not None:
            self.activation_policy.release(module)
        for part in [part for part, (owner, _) in self._owners.items() if owner is wrapped]:
            del self._owners[part]

    def _release(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None and self._is_ours(part := paged_part(tensor)):
            self.engine.unmanage(part)

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether it is paged, or too small to be and on the device that the module was brought to."""
        return _C.is_managed(tensor) or (tensor.device.type != "cpu" and str(tensor.device) == self.engine.torch_device)

    # --- hooks -----------------------------------------------------------------------------------------------------
    def on_tensor(self, module: nn.Module, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Page a tensor that is about to be registered, if its module is wrapped or modules are being loaded."""
        owner = self._owners.get(module)
        if owner is None:
            if self.pending.is_open:
                self._prepare_transformers()
                self.pending.take(module, name, tensor, kind)
        elif kind == "parameter":
            wrapped, path = owner
            wrapped.adopt_parameter(f"{path}.{name}" if path else name, tensor)

    def _on_submodule_added(self, module: nn.Module, name: str, submodule: nn.Module) -> None:
        owner = self._owners.get(module)
        if owner is None:
            return
        wrapped, path = owner
        wrapped.mark_stale()
        for label, parameter in submodule.named_parameters(prefix=f"{path}.{name}" if path else name):
            wrapped.adopt_parameter(label, parameter)

    def _prepare_transformers(self) -> None:
        """Transformers may be imported long after the engine opened, but not after its models are built."""
        if self._knows_transformers:
            return
        self._knows_transformers = transformers_saving.install(self._patches, self.engine)
        if self._knows_transformers and self.config.uses_cuda:
            device = torch.device(self.engine.torch_device)
            transformers_loading.install(self._patches, device=device, is_open=lambda: self.pending.is_open)
            compared_addresses.install_for_transformers(self._patches)

    def _after_copy(self, original: Callable[..., Any], parameter: nn.Parameter, *args: Any) -> Any:
        """Page a copy of a paged parameter while modules are loaded: a reference model, say."""
        copied = original(parameter, *args)
        if self.pending.is_open and _C.is_managed(parameter) and isinstance(copied, nn.Parameter):
            label = f"copy of {self._label_of(parameter) or 'parameter'}"
            self.engine.manage(copied, kind="parameter", label=label, of_module=True)
        return copied

    def _swapped(self, original: Callable[..., Any], one: torch.Tensor, other: torch.Tensor) -> None:
        """Keep track of two tensors that become each other. Torch refuses where weak references are.

        Raises:
            OffloadError: If what a wrapped module holds now cannot be brought.
        """
        for tensor in (one, other):
            self._unpickled.forget(tensor)
        let_go = [
            (wrapped, known[0], tensor, known[1])
            for wrapped in list(self._wrapped.values())
            for tensor in (one, other)
            if (known := wrapped.let_go(tensor)) is not None
        ]
        try:
            original(one, other)
            for _, _, tensor, _ in let_go:
                # Its list of hooks stayed, the call of them went with the content: another hook would join a dead list.
                tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        finally:
            for wrapped, label, tensor, kind in let_go:
                wrapped.take_up(label, tensor, kind)

    def _after_conversion(
        self, original: Callable[..., Any], module: nn.Module, fn: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Look at a wrapped module again after ``to``, ``half`` and the like, which may replace parameters.

        Raises:
            OffloadError: If tensors would leave the device that they are paged on.
        """
        result = original(module, functools.partial(self._converted, module, fn), *args, **options)
        owner = self._owners.get(module)
        if owner is not None:
            owner[0].mark_stale()
        return result

    def _converted(
        self, module: nn.Module, fn: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        """Convert one tensor, unless a copy of it on another device would be what the module computes with."""
        converted = fn(tensor, *args, **options)
        paged_on = torch.device(self.engine.torch_device)
        moves = tensor.device == paged_on and converted.device not in (paged_on, torch.device("meta"))
        if moves and (module in self._owners or _C.engine_of(tensor) is not None):
            raise OffloadError(
                f"cannot move {type(module).__name__} from {tensor.device} to {converted.device}, where nothing would "
                f"page it; {_KEEP_ON_CPU if paged_on.type == 'cpu' else _UNWRAP_FIRST}"
            )
        return converted

    def _refresh(self) -> None:
        for wrapped in list(self._wrapped.values()):
            wrapped.refresh()

    def _label_of(self, parameter: torch.Tensor) -> str | None:
        labels = (wrapped.label_of(paged_part(parameter)) for wrapped in list(self._wrapped.values()))
        return next((label for label in labels if label is not None), None)


def _tensors_in(module: nn.Module) -> list[torch.Tensor]:
    """Return what a module holds; of quantized parameters, what they are made of."""
    named = all_parts_of([*module.named_parameters(), *module.named_buffers()])
    beside = [part for child in module.modules() for _, part in parts_beside(child)]
    return [*(tensor for _, tensor in named), *beside]


def _engine_in(node: NodeBudget | None, config: Config) -> tuple[JoinedBudget | None, _C.Engine]:
    """Start an engine with a part of a budget of the machine, or of its own where there is none to be had.

    Raises:
        OffloadError: As from :func:`_started_engine`.
    """
    joined = None if node is None else node.join()
    if joined is None:
        return None, _engine_of(config, None)
    try:
        return joined, _engine_of(config.replace(ram=joined.part_bytes), joined)
    except ConfigError as error:  # of the launch's ranks none is missing: this is a child of one
        joined.close()
        logger.info("ram: %s; this process keeps to a part of its own", error)
        return None, _engine_of(config, None)
    except BaseException:
        joined.close()
        raise


def _engine_of(config: Config, joined: JoinedBudget | None) -> _C.Engine:
    """Start an engine with settings that are all decided.

    Raises:
        OffloadError: As from :func:`_started_engine`.
    """
    directories = config.directories_of(environment.local_rank())
    return _started_engine(
        budget_bytes=config.ram or 0,
        directories=[str(directory) for directory in directories],
        stores=list(config.stores),
        io_engine=config.io_engine,
        queue_depth=config.queue_depth,
        io_timeout=config.io_timeout,
        page_elements=config.page_elements,
        min_paged_bytes=config.min_paged_bytes,
        device_bytes=config.compute_bytes if config.gpu is not None else 0,
        updates_on_host=config.optimizer_device == "cpu",
        activations_stay_on_host=config.activations == "ram",
        link_bytes_per_second=config.link_rate or 0,
        ssd_bytes_per_second=config.ssd_rate or 0,
        device_kind="cuda" if config.uses_cuda else "emulated",
        device_ordinal=gpu.current() if config.uses_cuda else 0,
        remedy=REMEDIES[config.activations],
        keep_free_bytes=[resources.kept_bytes(directory, keep_free=config.keep_free) for directory in directories],
        max_file_bytes=None if config.max_spill is None else config.max_spill // len(directories),
        copies_checkpoints=config.checkpoint_pages == "copy",
        joined=joined,
    )


def _started_engine(*, joined: JoinedBudget | None, **options: Any) -> _C.Engine:
    """Start an engine, with a part of a budget where there is one.

    Raises:
        OffloadError: If it cannot be, also where what C++ raised is the system's own: it has no thread left, say.
    """
    try:
        return _C.Engine(
            **options,
            ledger=None if joined is None else joined.ledger,
            guaranteed_bytes=0 if joined is None else joined.guaranteed_bytes,
        )
    except OffloadError:
        raise
    except RuntimeError as error:
        raise OffloadError(
            f"host tier: the engine cannot be started: {error}; look at the limits on threads (ulimit -u) and on the "
            "address space (ulimit -v)"
        ) from error


def _keys_of_higher_order(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return functools.reduce(lambda keys, key: keys.remove(key), PAGED_KEYS, original(*args, **options))
