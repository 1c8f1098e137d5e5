"""Memory accesses of one forward and backward pass, recorded on fake tensors: shapes without numbers.

The module runs under a mode that sees every operator below autograd. Floating-point tensors are fake: they say that
they are on the CPU, so that models choose the kernels that they would choose there, and own no bytes. Small tensors of
integers and truth values are real, since models look at them: positions, masks, lengths.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_offload.errors import OffloadError
from torch_offload.planning.operator_calls import Call, is_passing, reads_arguments, tensors_in

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

PHASES = ("forward", "backward")
MAX_REAL_ELEMENTS = 1 << 24


class What(Enum):
    """An event of a pass."""

    allocate = "allocate"  # a temporary
    free = "free"
    operate = "operate"  # an operator uses parameters, or temporaries that autograd saved
    save = "save"  # autograd keeps a temporary for the backward pass
    finish = "finish"  # the gradient of a parameter is complete, and lies in a temporary
    backward = "backward"  # the backward pass begins


class Moment(NamedTuple):
    """Something that happens to memory.

    Attributes:
        what: The kind of event.
        subject: Number of a temporary, or of a parameter (`finish`).
        size_bytes: Of a temporary.
        parameters: Numbers of what an operator uses.
        temporaries: The same of temporaries; the one that holds a finished gradient.
    """

    what: What
    subject: int = -1
    size_bytes: int = 0
    parameters: tuple[int, ...] = ()
    temporaries: tuple[int, ...] = ()


@dataclass(frozen=True)
class ParameterSize:
    """The bytes of one parameter or buffer; tied ones are one.

    Attributes:
        name: The first name that the module has for it.
        elements: How many.
        element_bytes: Bytes of each.
        dtype: Of each.
        is_trained: Whether it gets a gradient.
    """

    name: str
    elements: int
    element_bytes: int
    dtype: torch.dtype
    is_trained: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.element_bytes


@dataclass
class Recording:
    """One pass over one batch.

    Attributes:
        parameters: In the order of the module.
        moments: In the order in which they happen.
        calls: How often each operator call is made, by phase; those that only look at metadata left out.
    """

    parameters: list[ParameterSize] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    calls: dict[str, Counter[Call]] = field(default_factory=lambda: {phase: Counter() for phase in PHASES})


def record(module: nn.Module, batch: Mapping[str, Any]) -> Recording:
    """Run forward and backward once without touching the module or taking memory for it.

    Args:
        module: May be on the meta device. Its mode (training, checkpointing) is used as it is.
        batch: Arguments of its forward by name; a meta tensor of integers stands for one full of ones.

    Raises:
        OffloadError: If what the module does depends on numbers that are not known yet, torch cannot follow it without
            them, or it returns no loss.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder()
    stand_ins = recorder.adopt(module, mode)
    inputs = {name: _input(value, mode) for name, value in batch.items()}
    try:
        with mode, recorder:
            torch.func.functional_call(_Pass(module, recorder), stand_ins, (inputs,))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise OffloadError(
            f"the forward of {type(module).__name__} depends on numbers that only a real run has ({error}); "
            "plan does not support it"
        ) from error
    except RuntimeError as error:  # such as grouped products in float32, of which some versions know no shape
        raise OffloadError(
            f"cannot trace the forward and backward of {type(module).__name__} on fake tensors ({error}); if a real "
            "step fails the same way, fix the model; otherwise plan does not support it"
        ) from error
    finally:
        recorder.stop()
    return recorder.recording


class _Pass(nn.Module):
    """Forward and backward as one call, so that parameters stay replaced while checkpointed layers run again."""

    def __init__(self, model: nn.Module, recorder: "_Recorder") -> None:
        super().__init__()
        self.model = model
        self.train(model.training)
        self._recorder = recorder

    def forward(self, batch: dict[str, Any]) -> None:
        with self._recorder.saving():
            loss = _loss_of(self.model(**batch))
        self._recorder.begin_backward()
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


def _input(value: Any, mode: "FakeTensorMode") -> Any:
    """Return a stand-in for an argument of the forward."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return _stand_in(value, mode)
    return torch.ones(value.shape, dtype=value.dtype) if value.is_meta else value.detach().cpu()


def _stand_in(tensor: Tensor, mode: "FakeTensorMode") -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, shape, torch.device("cpu")).requires_grad_(tensor.requires_grad)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and notes what it does to memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._phase = PHASES[0]
        self._temporaries: dict[int, int] = {}  # by storage
        self._parameters: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self._is_on = True

    def adopt(self, module: nn.Module, mode: "FakeTensorMode") -> dict[str, Tensor]:
        """Return stand-ins for all parameters and buffers, by name; tied ones are one tensor."""
        known: dict[int, Tensor] = {}
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if id(tensor) not in known:
                known[id(tensor)] = self._adopt_one(name, tensor, mode)
        return {f"model.{name}": known[id(tensor)] for name, tensor in named}

    def _adopt_one(self, name: str, tensor: Tensor, mode: "FakeTensorMode") -> Tensor:
        stand_in = _stand_in(tensor, mode)
        index = len(self.recording.parameters)
        self._parameters[stand_in.untyped_storage()._cdata] = index
        self.recording.parameters.append(
            ParameterSize(name, tensor.numel(), tensor.element_size(), tensor.dtype, tensor.requires_grad)
        )
        if tensor.requires_grad:
            stand_in.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter: self._finish(index, parameter)
            )
        return stand_in

    def stop(self) -> None:
        """Note nothing more: what dies after the pass is not part of it."""
        self._is_on = False

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
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in([args, kwargs])
        if _is_about_integers(func, given, args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if is_passing(func):
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        self._track(tensors_in(output))
        self._note_use(func, given)
        self.recording.calls[self._phase][Call.of(func, args, kwargs, output)] += 1
        return output

    def _track(self, outputs: list[Tensor]) -> None:
        for output in outputs:
            storage = output.untyped_storage()
            key = storage._cdata
            if key in self._temporaries or key in self._parameters:
                continue
            self._temporaries[key] = self._count
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._free(key))  # type: ignore[misc]
            self._note(Moment(What.allocate, self._count, storage.nbytes()))
            self._count += 1

    def _free(self, key: int) -> None:
        self._references.pop(key, None)
        self._note(Moment(What.free, self._temporaries.pop(key)))

    def _note_use(self, func: Any, given: list[Tensor]) -> None:
        if not reads_arguments(func):
            return
        keys = list(dict.fromkeys(tensor.untyped_storage()._cdata for tensor in given))
        parameters = tuple(self._parameters[key] for key in keys if key in self._parameters)
        temporaries = tuple(self._temporaries[key] for key in keys if key in self._temporaries)
        if parameters or temporaries:
            self._note(Moment(What.operate, parameters=parameters, temporaries=temporaries))

    def _finish(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            temporary = self._temporaries.get(parameter.grad.untyped_storage()._cdata)
            self._note(Moment(What.finish, index, temporaries=() if temporary is None else (temporary,)))

    def _note(self, moment: Moment) -> None:
        if self._is_on:
            self.recording.moments.append(moment)


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


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
