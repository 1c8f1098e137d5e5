"""Updates during the backward, as ``Config(update="backward")`` asks for.

A parameter is updated as soon as its gradient is complete: its optimizer's own step runs over a group of this parameter
alone, which gives the bits of a step over all, and the gradient has no bytes afterwards. `step()` then finds these
gradients applied, leaves them out and does the rest. What a run would have to do with gradients between the two (clip,
accumulate, read) cannot be done any more and raises.

Which optimizer updates a parameter is known from its first step on, so that one is an ordinary one.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_offload import _C
from torch_offload.errors import OffloadError
from torch_offload.optim.adamw import AdamW

SETTING = 'update="backward"'
_LEAVE_OUT = "or leave the setting update out"

SUPPORTED: tuple[type[Optimizer], ...] = (
    AdamW,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that update each parameter from what belongs to it: a step over one is a part of a step over all."""


@dataclass(frozen=True)
class _Place:
    """Where an optimizer has a parameter."""

    optimizer: weakref.ref[Optimizer]
    group: int
    position: int

    def owner_of(self, parameter: torch.Tensor) -> Optimizer | None:
        """Return the optimizer, None if the parameter is not in this place any more."""
        optimizer = self.optimizer()
        if optimizer is None or self.group >= len(optimizer.param_groups):
            return None
        parameters = optimizer.param_groups[self.group]["params"]
        is_there = self.position < len(parameters) and parameters[self.position] is parameter
        return optimizer if is_there else None


@dataclass
class _Updated:
    """What of an optimizer has been updated since its last step."""

    optimizer: Optimizer
    options: dict[int, dict[str, Any]] = field(default_factory=dict)  # of its groups, by number, at the update
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # by id of the parameter
    leaving_out: RemovableHandle | None = None  # the last hook before its step
    are_left_out: bool = False  # that has run

    def end(self) -> None:
        if self.leaving_out is not None:
            self.leaving_out.remove()


class BackwardUpdates:
    """Runs updates when gradients are complete, and prepares the steps that come after them.

    Threads: the one that trains.
    """

    def __init__(self, engine: _C.Engine) -> None:
        """Know no optimizer.

        Args:
            engine: Pages parameters, gradients and states.
        """
        self._engine = engine
        self._places: dict[int, _Place | None] = {}  # by id of the parameter; None: of several optimizers
        self._updated: dict[int, _Updated] = {}  # by id of the optimizer

    # --- The backward ----------------------------------------------------------------------------------------------
    def complete(self, parameter: torch.Tensor) -> None:
        """Take the parameter's gradient as complete, and update the parameter, as paged as it is.

        Raises:
            OffloadError: If this is its second gradient since the last step, or one that is not what a step would use.
        """
        place = self._places.get(id(parameter))
        optimizer = None if place is None else place.owner_of(parameter)
        if place is None or optimizer is None:
            self._engine.gradient_complete(parameter)
            return  # the step updates it
        states = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
        pin = self._engine.hold_for_update(parameter, states)
        if pin is not None:
            with pin:
                self._update(parameter, place, optimizer, states)

    def _update(self, parameter: torch.Tensor, place: _Place, optimizer: Optimizer, states: list[torch.Tensor]) -> None:
        gradient = _gradient_of(parameter)
        _check_gradient(gradient)
        updated = self._updated.setdefault(id(optimizer), _Updated(optimizer))
        if id(parameter) in updated.gradients:
            raise OffloadError(
                f"a second gradient of the same parameter before optimizer.step(), with {SETTING}: gradients cannot be "
                "accumulated, over backwards or within one (checkpointing with use_reentrant=True does that to shared "
                "parameters), and no step can be skipped. Take one backward and one step per batch "
                f"(gradient_accumulation_steps=1), load a checkpoint after an error in between, {_LEAVE_OUT}"
            )
        group = optimizer.param_groups[place.group]
        if place.group not in updated.options:
            updated.options[place.group] = _options_of(group)
        updated.gradients[id(parameter)] = (parameter, gradient)  # first: the update may fail in its middle
        self._step_one(optimizer, group, parameter)
        self._engine.gradient_applied(parameter, states)
        increment_version(parameter)  # fused kernels do not: what of the backward needs the value before raises
        updated.gradients[id(parameter)] = (parameter, _gradient_of(parameter))

    def _step_one(self, optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
        whole = optimizer.param_groups
        self._engine.begin_optimizer_step()
        optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            _step_without_hooks(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups = whole
            self._engine.abandon_optimizer_step()

    # --- Steps -----------------------------------------------------------------------------------------------------
    def begin_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Have a step leave out what is updated already.

        Raises:
            OffloadError: If the step would not do what the updates did.
        """
        _check_optimizer(optimizer)
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if closure is not None:
            raise OffloadError(f"a step with a closure, with {SETTING}: call backward() before step(), {_LEAVE_OUT}")
        self._check_owner(optimizer)
        updated = self._updated.get(id(optimizer))
        if updated is None:
            return
        for number, before in updated.options.items():
            _check_options(optimizer.param_groups[number], before)
        if updated.leaving_out is None:  # after the hooks of the program, which would take the rest for all gradients
            updated.leaving_out = optimizer.register_step_pre_hook(self._leave_out)

    def _leave_out(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        updated = self._updated.get(id(optimizer))
        if updated is None:
            return
        if not updated.are_left_out:
            _check_kept(updated)
        updated.are_left_out = True
        for parameter, _ in updated.gradients.values():
            parameter.grad = None

    def end_step(self, optimizer: Optimizer) -> None:
        """Give the gradients back that were left out, and take note of whom the optimizer updates."""
        updated = self._updated.pop(id(optimizer), None)
        gradients = {} if updated is None else updated.gradients
        if updated is not None:
            updated.end()
        for key, (group, position, parameter) in _places_in(optimizer).items():
            if key not in gradients and parameter.grad is not None and _C.is_managed(parameter):
                self._take_note(parameter, _Place(weakref.ref(optimizer), group, position))
        for parameter, gradient in gradients.values():
            parameter.grad = gradient

    def _take_note(self, parameter: torch.Tensor, place: _Place) -> None:
        known = self._places.get(id(parameter), place)
        owner = None if known is None else known.owner_of(parameter)
        is_of_several = owner is not None and owner is not place.optimizer()
        self._places[id(parameter)] = None if is_of_several else place

    def _check_owner(self, optimizer: Optimizer) -> None:
        others = [updated for updated in self._updated.values() if updated.optimizer is not optimizer]
        if not others:
            return
        for key in _places_in(optimizer):
            owner = next((updated.optimizer for updated in others if key in updated.gradients), None)
            if owner is not None:
                raise OffloadError(
                    f"a step of {type(optimizer).__name__} over a parameter that {type(owner).__name__} has updated "
                    f"during the backward, with {SETTING}: delete the optimizer that is not used any more, "
                    f"{_LEAVE_OUT}"
                )

    def loaded(self, optimizer: Optimizer) -> None:
        """The optimizer has loaded a state: what it had updated does not matter any more."""
        parameters = _places_in(optimizer)
        for key, updated in list(self._updated.items()):
            if updated.optimizer is optimizer or not parameters.keys().isdisjoint(updated.gradients):
                self._updated.pop(key).end()

    # --- Between the two -------------------------------------------------------------------------------------------
    def updated_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that wait for their optimizer's step."""
        for updated in self._updated.values():
            for parameter, _ in updated.gradients.values():
                yield parameter

    def check_stepped(self) -> None:
        """Refuse to use parameters of which some are updated and others wait for the step.

        Raises:
            OffloadError: If the step is missing.
        """
        if self._updated:
            names = " and ".join(type(updated.optimizer).__name__ for updated in self._updated.values())
            raise OffloadError(
                f"the backward has updated parameters, with {SETTING}, and step() of {names} was not called since. "
                "Call it before the model is used or saved, load a checkpoint into the model and the optimizer "
                f"(load_state_dict), {_LEAVE_OUT}"
            )


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        raise OffloadError("a gradient went while its parameter was updated")
    return gradient


def _places_in(optimizer: Optimizer) -> dict[int, tuple[int, int, torch.Tensor]]:
    return {
        id(parameter): (number, position, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }


def _step_without_hooks(optimizer: type[Optimizer]) -> Any:
    """Return the step as its class defines it: torch puts one that calls hooks in its place."""
    step: Any = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _check_optimizer(optimizer: Optimizer) -> None:
    known = {_step_without_hooks(kind) for kind in SUPPORTED}
    if _step_without_hooks(type(optimizer)) not in known:
        raise OffloadError(
            f"{type(optimizer).__name__} with {SETTING}, which knows torch_offload.AdamW and those of torch.optim that "
            f"update each parameter by itself: use one of them, {_LEAVE_OUT}"
        )
    if optimizer.defaults.get("max_grad_norm") is not None:
        raise OffloadError(
            f"max_grad_norm={optimizer.defaults['max_grad_norm']} of {type(optimizer).__name__} with {SETTING}: the "
            f"norm of all gradients is not known when the first is applied. Set it to None, {_LEAVE_OUT}"
        )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise OffloadError(f"scaled gradients with {SETTING}: train without a GradScaler (in bf16), {_LEAVE_OUT}")


def _check_gradient(gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise OffloadError(f"backward(create_graph=True) with {SETTING}: take create_graph out, {_LEAVE_OUT}")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise OffloadError(
            f"{distributed.get_world_size()} processes train together with {SETTING}: a gradient would be applied "
            f"before it is averaged. Train in one process, {_LEAVE_OUT}"
        )


def _check_kept(updated: _Updated) -> None:
    for parameter, gradient in updated.gradients.values():
        if parameter.grad is not gradient:
            raise OffloadError(
                f"a gradient was replaced or set to None between the backward and step(), with {SETTING}: the "
                f"parameter is updated already. Call zero_grad() after step() only, {_LEAVE_OUT}"
            )


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _check_options(group: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        now = group.get(name)
        if isinstance(value, torch.Tensor):
            is_same = isinstance(now, torch.Tensor) and torch.equal(value, now)
        else:
            is_same = value == now
        if not is_same:
            raise OffloadError(
                f"{name} was {value} at the backward and is {now} at step(), with {SETTING}: change it after step(), "
                f"as schedulers do, {_LEAVE_OUT}"
            )
