"""Memory accesses of a pass, recorded on fake tensors: shapes without numbers.

The module runs under a mode that sees every operator below autograd. Floating-point tensors are fake: they say that
they are where the module will compute, so that models choose the kernels that they would choose there, and own no
bytes. Small tensors of integers and truth values are real, since models look at them: positions, masks, lengths. They
are on the CPU, and what computes with them and fractions elsewhere sees them as if they were there.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_offload.errors import OffloadError
from torch_offload.planning.operator_calls import (
    Call,
    is_passing,
    packet_name,
    reads_arguments,
    rows_looked_up,
    tensors_in,
)
from torch_offload.planning.quantized_weights import COMPOSITES, check_can_be_traced, model_elements, stand_in_state
from torch_offload.runtime.preflight import is_embedding_table
from torch_offload.runtime.tensor_parts import parts_of

PHASES = ("forward", "backward")
MAX_REAL_ELEMENTS = 1 << 24
HOST = "cpu"


class What(Enum):
    """An event of a pass."""

    allocate = "allocate"  # a temporary
    free = "free"
    operate = "operate"  # an operator uses parameters, or temporaries that autograd saved
    save = "save"  # autograd keeps a temporary for the backward pass
    finish = "finish"  # the gradient of a parameter is complete, and lies in a temporary
    backward = "backward"  # the backward pass begins
    layer = "layer"  # the forward of a layer begins, or its backward has ended


class Moment(NamedTuple):
    """Something that happens to memory.

    Attributes:
        what: The kind of event.
        subject: Number of a temporary, of a parameter (`finish`), or of a layer.
        size_bytes: Of a temporary.
        parameters: Numbers of what an operator uses.
        temporaries: The same of temporaries; the one that holds a finished gradient.
        rows: Of a table that they are looked up in, which is then the only parameter; 0 for every other operator.
    """

    what: What
    subject: int = -1
    size_bytes: int = 0
    parameters: tuple[int, ...] = ()
    temporaries: tuple[int, ...] = ()
    rows: int = 0


@dataclass(frozen=True)
class ParameterSize:
    """The bytes of one parameter or buffer; tied ones are one.

    Attributes:
        name: The first name that the module has for it.
        elements: How many.
        element_bytes: Bytes of each.
        dtype: Of each.
        is_trained: Whether it gets a gradient.
        is_loaded: Whether its bytes lie in a checkpoint.
        is_table: Whether only rows of it are ever read, and it is not trained.
        model_elements: Numbers of the model that it holds: more than elements where they are packed, 0 of statistics.
    """

    name: str
    elements: int
    element_bytes: int
    dtype: torch.dtype
    is_trained: bool
    is_loaded: bool = False
    is_table: bool = False
    model_elements: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.element_bytes


@dataclass
class RecordedLayer:
    """The forward of one layer.

    Attributes:
        calls: How often each operator call is made.
        saved_bytes: Of each temporary that autograd keeps from it, by number.
    """

    calls: Counter[Call] = field(default_factory=Counter)
    saved_bytes: dict[int, int] = field(default_factory=dict)


@dataclass
class Recording:
    """One pass over one batch.

    Attributes:
        parameters: In the order of the module.
        moments: In the order in which they happen.
        calls: How often each operator call is made, by phase; those that only look at metadata left out.
        layers: The layers that were asked for, by name.
    """

    parameters: list[ParameterSize] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    calls: dict[str, Counter[Call]] = field(default_factory=dict)
    layers: dict[str, RecordedLayer] = field(default_factory=dict)


def record(
    module: nn.Module,
    batch: Mapping[str, Any],
    *,
    loaded: Collection[Tensor] = (),
    layers: Mapping[str, nn.Module] = MappingProxyType({}),
    cut_at: Sequence[nn.Module] = (),
    device: str = HOST,
) -> Recording:
    """Run forward and backward once without touching the module or taking memory for it.

    Args:
        module: May be on the meta device. Its mode (training, checkpointing) is used as it is.
        batch: Arguments of its forward by name; a meta tensor of integers stands for one full of ones.
        loaded: Parameters and buffers whose bytes lie in a checkpoint.
        layers: Modules whose forward is recorded for itself as well, by name.
        cut_at: Modules at which the pass shall be divided: moments say where each begins, and ends in the backward.
        device: Where the module will compute. Another one than the CPU has to be there.

    Raises:
        OffloadError: As from :func:`traced`, or if the module returns no loss.
    """
    recorder = Recorder(PHASES, device)
    with recorder.following(layers), recorder.marking(cut_at):
        return traced(module, batch, recorder, _forward_and_backward, loaded=loaded)


def traced(
    module: nn.Module,
    batch: Mapping[str, Any],
    recorder: "Recorder",
    program: "Program",
    *,
    loaded: Collection[Tensor] = (),
) -> Recording:
    """Run a program once on stand-ins of the module's tensors.

    Args:
        module: As for :func:`record`.
        batch: The same.
        recorder: One that has recorded nothing.
        program: Called with the module, stand-ins of the batch and the recorder.
        loaded: As for :func:`record`.

    Raises:
        OffloadError: If what the module does depends on numbers that are not known yet, or torch cannot follow it
            without them.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    stand_ins = recorder.adopt(module, {id(tensor) for tensor in loaded})
    inputs = {name: _input(value, recorder.stand_ins) for name, value in batch.items()}
    try:
        with recorder.stand_ins.mode, recorder:
            torch.func.functional_call(_Pass(module, recorder, program), stand_ins, (inputs,))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise OffloadError(
            f"the forward of {type(module).__name__} depends on numbers that only a real run has ({error}); "
            "plan does not support it"
        ) from error
    except RuntimeError as error:  # such as grouped products in float32, of which some versions know no shape
        raise OffloadError(
            f"cannot trace the {' and '.join(recorder.phases)} of {type(module).__name__} on fake tensors ({error}); "
            "if a real step fails the same way, fix the model; otherwise plan does not support it"
        ) from error
    finally:
        recorder.stop()
    return recorder.recording


class _Pass(nn.Module):
    """A program as one call, so that parameters stay replaced while checkpointed layers run again."""

    def __init__(self, model: nn.Module, recorder: "Recorder", program: "Program") -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._recorder = recorder
        self._program = program

    def forward(self, batch: dict[str, Any]) -> None:
        self._program(self.model, batch, self._recorder)


def _forward_and_backward(model: nn.Module, batch: dict[str, Any], recorder: "Recorder") -> None:
    with recorder.saving():
        loss = _loss_of(model(**batch))
    recorder.begin_backward()
    loss.backward()  # type: ignore[no-untyped-call]


def _loss_of(output: Any) -> Tensor:
    """Return what a training loop would call backward on."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise OffloadError(
            "the module returned no loss to train on; give labels in the batch, and a module with parameters that "
            "require gradients"
        )
    return loss if loss.ndim == 0 else loss.float().mean()


def _input(value: Any, stand_ins: "StandIns") -> Any:
    """Return a stand-in for an argument of the forward."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return stand_ins.of(value)
    return torch.ones(value.shape, dtype=value.dtype) if value.is_meta else value.detach().cpu()


class StandIns:
    """Makes fake tensors that say that they are on one device."""

    def __init__(self, device: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.device = torch.device(device)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, without its numbers."""
        from torch._subclasses.fake_tensor import FakeTensor

        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self.mode, shape, self.device).requires_grad_(tensor.requires_grad)

    def moved(self, arguments: Any) -> Any:
        """Return arguments of an operator on fractions, with all of them on the device: real tensors, and its name."""
        if self.device.type == "cpu":
            return arguments
        if isinstance(arguments, Tensor):
            return arguments if _is_fake(arguments) or arguments.ndim == 0 else self._seen(arguments)
        if isinstance(arguments, torch.device):
            return self.device
        if isinstance(arguments, list | tuple):
            return [self.moved(argument) for argument in arguments]
        return arguments

    def _seen(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            return self.of(tensor)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and notes what it does to memory."""

    def __init__(self, phases: tuple[str, ...], device: str = HOST) -> None:
        """Note nothing before :meth:`adopt`.

        Args:
            phases: Names of what is recorded: a forward, or a forward and a backward.
            device: Where the module will compute.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases = phases
        self.stand_ins = StandIns(device)
        self.recording = Recording(calls={phase: Counter() for phase in phases})
        self._phase = phases[0]
        self._layer: RecordedLayer | None = None
        self._sizes: dict[int, int] = {}  # of temporaries that are alive
        self._temporaries: dict[int, int] = {}  # by storage
        self._parameters: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self._is_on = True

    def adopt(self, module: nn.Module, loaded: Collection[int] = ()) -> dict[str, Tensor]:
        """Return stand-ins for all parameters and buffers, by name; tied ones are one tensor.

        Args:
            module: Whose they are.
            loaded: What lies in a checkpoint, by `id`.
        """
        known: dict[int, Tensor] = {}
        tables = _tables_of(module)
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if id(tensor) in known:
                continue
            check_can_be_traced(name, tensor)
            for suffix, part in parts_of(tensor):
                size = ParameterSize(
                    f"{name}{suffix}",
                    part.numel(),
                    part.element_size(),
                    part.dtype,
                    part.requires_grad and self._is_training(),
                    is_loaded=id(part) in loaded,
                    is_table=id(part) in tables,
                    model_elements=model_elements(part) if part is tensor else 0,
                )
                known[id(part)] = self._adopt_one(size, part)
            state = stand_in_state(
                tensor, lambda part: known[id(part)] if id(part) in known else self.stand_ins.of(part)
            )
            if state is not None:
                known[id(tensor)].quant_state = state  # type: ignore[attr-defined]
        return {f"model.{name}": known[id(tensor)] for name, tensor in named}

    def _is_training(self) -> bool:
        return self.phases == PHASES

    def _adopt_one(self, size: ParameterSize, tensor: Tensor) -> Tensor:
        stand_in = self.stand_ins.of(tensor)
        index = len(self.recording.parameters)
        self._parameters[stand_in.untyped_storage()._cdata] = index
        self.recording.parameters.append(size)
        if tensor.requires_grad:
            stand_in.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter: self._finish(index, parameter)
            )
        return stand_in

    def stop(self) -> None:
        """Note nothing more: what dies after the pass is not part of it."""
        self._is_on = False

    def restart(self) -> None:
        """Forget what was recorded but for the temporaries that are alive: they are there when the pass begins."""
        alive = sorted(self._temporaries.values())
        self.recording.moments = [Moment(What.allocate, number, self._sizes[number]) for number in alive]
        self.recording.calls = {phase: Counter() for phase in self.phases}

    @contextmanager
    def following(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the forward of some modules for itself as well."""
        hooks = []
        for name, layer in layers.items():
            entry = self.recording.layers[name] = RecordedLayer()
            hooks.append(layer.register_forward_pre_hook(lambda *_, entry=entry: self._enter(entry)))
            hooks.append(layer.register_forward_hook(lambda *_: self._enter(None)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def marking(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Note where the forward of some modules begins, and where their backward has ended."""
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: self._begin_layer(number, [args, kwargs]), with_kwargs=True
            )
            for number, layer in enumerate(layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin_layer(self, number: int, arguments: Any) -> None:
        """Mark its forward, and its backward at the gradient of what it gets; a forward that runs again is none."""
        if self._phase != PHASES[0]:
            return
        mark = Moment(What.layer, number)
        self._note(mark)
        given = next((tensor for tensor in tensors_in(arguments) if tensor.requires_grad), None)
        if given is not None:
            given.register_hook(lambda _: self._note(mark))  # type: ignore[no-untyped-call]

    def _enter(self, layer: RecordedLayer | None) -> None:
        self._layer = layer

    def begin_backward(self) -> None:
        """The forward has ended."""
        self._note(Moment(What.backward))
        self._phase = PHASES[1]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Note what autograd keeps, as the engine's own hooks would see it."""

        def keep(tensor: Tensor) -> Tensor:
            temporary = self._temporaries.get(tensor.untyped_storage()._cdata)
            if temporary is not None:
                self._note(Moment(What.save, temporary))
                if self._layer is not None:
                    self._layer.saved_bytes[temporary] = self._sizes[temporary]
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in([args, kwargs])
        if _is_about_integers(func, given, args, kwargs):
            on_host = {"device": torch.device(HOST)} if "device" in kwargs else {}
            with _disable_current_modes():
                return func(*args, **kwargs | on_host)
        if is_passing(func):
            return func(*args, **kwargs)
        args = self.stand_ins.moved(args)
        kwargs = {name: self.stand_ins.moved(value) for name, value in kwargs.items()}
        if (composite := COMPOSITES.get(packet_name(func))) is not None:
            with self:
                return composite(*args, **kwargs)
        output = func(*args, **kwargs)
        self._track(tensors_in(output))
        self._note_use(func, given, args)
        call = Call.of(func, args, kwargs, output)
        self.recording.calls[self._phase][call] += 1
        if self._layer is not None:
            self._layer.calls[call] += 1
        return output

    def _track(self, outputs: list[Tensor]) -> None:
        for output in outputs:
            storage = output.untyped_storage()
            key = storage._cdata
            if key in self._temporaries or key in self._parameters:
                continue
            self._temporaries[key] = self._count
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._free(key))  # type: ignore[misc]
            self._sizes[self._count] = storage.nbytes()
            self._note(Moment(What.allocate, self._count, storage.nbytes()))
            self._count += 1

    def _free(self, key: int) -> None:
        self._references.pop(key, None)
        number = self._temporaries.pop(key)
        del self._sizes[number]
        self._note(Moment(What.free, number))

    def _note_use(self, func: Any, given: list[Tensor], args: Any) -> None:
        if not reads_arguments(func):
            return
        keys = list(dict.fromkeys(tensor.untyped_storage()._cdata for tensor in given))
        parameters = tuple(self._parameters[key] for key in keys if key in self._parameters)
        temporaries = tuple(self._temporaries[key] for key in keys if key in self._temporaries)
        if parameters or temporaries:
            rows = self._rows_of(func, args, parameters)
            self._note(Moment(What.operate, parameters=parameters, temporaries=temporaries, rows=rows))

    def _rows_of(self, func: Any, args: Any, parameters: tuple[int, ...]) -> int:
        """Return how many rows a lookup reads; of a table that trains, and on a GPU, the engine has the whole."""
        is_whole = self.stand_ins.device.type != "cpu"
        if is_whole or len(parameters) != 1 or self.recording.parameters[parameters[0]].is_trained:
            return 0
        return rows_looked_up(func, args)

    def _finish(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            temporary = self._temporaries.get(parameter.grad.untyped_storage()._cdata)
            self._note(Moment(What.finish, index, temporaries=() if temporary is None else (temporary,)))

    def _note(self, moment: Moment) -> None:
        if self._is_on:
            self.recording.moments.append(moment)


def _tables_of(module: nn.Module) -> set[int]:
    """Return what is looked up by rows only and does not train, by `id`."""
    tables: set[int] = set()
    others: set[int] = set()
    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            is_table = is_embedding_table(part, name) and not tensor.requires_grad
            (tables if is_table else others).add(id(tensor))
    return tables - others


def _is_about_integers(func: Any, given: list[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call can be made in earnest: nothing fake goes in, and little that is not a fraction comes out."""
    if any(_is_fake(tensor) or tensor.dtype.is_floating_point for tensor in given):
        return False
    if any(tensor.numel() > MAX_REAL_ELEMENTS for tensor in given):
        return False
    if given:
        return not kwargs.get("dtype", torch.int64).is_floating_point
    dtype = kwargs.get("dtype")
    if dtype is None:
        return str(func).startswith("aten.arange") and all(isinstance(value, int) for value in args)
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point and not dtype.is_complex


Program = Callable[[nn.Module, dict[str, Any], Recorder], None]
"""What is recorded: called with a module, a batch and the recorder."""


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
