"""Optimizer steps as the engine sees them: where they begin and end, and that what they need is paged.

Gradients and states become pages by themselves: gradients when they are complete, states when a step makes them or a
checkpoint brings them. What came otherwise is looked for in the first steps and whenever an optimizer has changed; a
step of one that has settled costs the same however many parameters it has.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_offload import _C
from torch_offload._compat import paged_part
from torch_offload.errors import OffloadError
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.runtime.backward_updates import BackwardUpdates
from torch_offload.runtime.eligibility import why_not_pageable
from torch_offload.runtime.unpickling import UnpickledTensors

STEPS_BETWEEN_SEARCHES = 64

Signature = tuple[tuple[int, int], ...]


@dataclass
class Known:
    """Result of the last search through an optimizer."""

    is_ours: bool = False  # it trains something of a wrapped module, paged or not
    signature: Signature = ()
    steps: int = 0
    is_searched: bool = False
    is_settled: bool = False

    def needs_search(self, signature: Signature) -> bool:
        return not self.is_settled or signature != self.signature or self.steps % STEPS_BETWEEN_SEARCHES == 0


class OptimizerHooks:
    """Hooks on the steps of every optimizer of the process.

    Threads: the one that trains.
    """

    def __init__(
        self,
        engine: _C.Engine,
        unpickled: UnpickledTensors,
        *,
        refresh: Callable[[], None],
        label_of: Callable[[torch.Tensor], str | None],
        updates: BackwardUpdates | None = None,
    ) -> None:
        """Install no hooks; :meth:`install` does.

        Args:
            engine: Pages gradients and states.
            unpickled: Knows which tensors a file brought.
            refresh: Pages what the modules got since they were last looked at.
            label_of: The name of a parameter of a wrapped module; None of others.
            updates: Those that run during the backward; None: a step does all of its own.
        """
        self._engine = engine
        self._unpickled = unpickled
        self._refresh = refresh
        self._label_of = label_of
        self._updates = updates
        self._known: weakref.WeakKeyDictionary[Optimizer, Known] = weakref.WeakKeyDictionary()
        self._calls = threading.local()  # `frame`: the call of `step` that this thread is in, by number
        self._unfinished: dict[int, str] = {}  # optimizers in a step, or whose last one raised: by id, for a message

    def check_steps_are_whole(self) -> None:
        """Refuse to keep parameters of which some were updated by a step and others were not.

        Raises:
            OffloadError: If a step raised before its end, and its optimizer has loaded no state since; if a backward
                has updated parameters and the step is missing.
        """
        if self._unfinished:
            raise OffloadError(
                f"a step of {' and '.join(self._unfinished.values())} raised before its end: some parameters are "
                "updated and others are not. Load a checkpoint into the model and the optimizer (load_state_dict), or "
                "unwrap the module to save it as it is"
            )
        if self._updates is not None:
            self._updates.check_stepped()

    def install(self, patches: Patches) -> list[RemovableHandle]:
        """Hook every optimizer, and have loaded states paged as they arrive."""
        patches.replace(replaced_functions.OPTIMIZER_LOADED_STATE, self._page_loaded_state)
        patches.replace(replaced_functions.OPTIMIZER_LOAD, self._after_loading)
        return [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def unsettle(self) -> None:
        """Search through every optimizer at its next step: other tensors are paged now."""
        for known in self._known.values():
            known.is_settled = False

    def states_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return what all optimizers keep for a parameter."""
        states = [optimizer.state.get(parameter, {}) for optimizer in list(self._known)]
        return [paged_part(value) for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def _before(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        known = self._known.setdefault(optimizer, Known())
        signature = _signature(optimizer)
        known.is_searched = known.needs_search(signature)
        known.signature = signature
        known.steps += 1
        if known.is_searched:
            known.is_ours = any(self._is_ours(parameter) for parameter in _parameters(optimizer))
        if not known.is_ours:
            return
        if known.is_searched:
            self._refresh()
            known.is_settled = not self._adopt_gradients(optimizer)
        if self._updates is not None:
            self._updates.begin_step(optimizer, args, options)
        self._calls.frame = id(sys._getframe(1))
        self._engine.forget_buckets()
        self._engine.begin_optimizer_step()
        self._unfinished[id(optimizer)] = type(optimizer).__name__

    def abandon_raised(self) -> None:
        """Have the step of this thread end that raised before its end, if there is one: torch calls no hook then."""
        call = self._calls.__dict__.get("frame")
        if call is None:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == call:
                return
            frame = frame.f_back
        self._calls.frame = None
        self._engine.abandon_optimizer_step()

    def _after(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        known = self._known.get(optimizer)
        if known is None or not known.is_ours:
            return
        self._unfinished.pop(id(optimizer), None)
        try:
            if self._updates is not None:
                self._updates.end_step(optimizer)
            if known.is_searched:
                found_any = self._adopt_states(optimizer)
                known.is_settled = known.is_settled and not found_any
        finally:
            self._calls.frame = None
            self._engine.end_optimizer_step()

    def _is_ours(self, parameter: torch.Tensor) -> bool:
        """Say whether a step of it ends the pass: adapters may be too small to be paged, what they adapt is not."""
        return _C.is_managed(paged_part(parameter)) or self._label_of(parameter) is not None

    def _adopt_gradients(self, optimizer: Optimizer) -> bool:
        """Page the gradients that no hook saw being completed; returns whether there were any."""
        found_any = False
        for parameter in _parameters(optimizer):
            if parameter.grad is None:
                continue
            gradient, owner = paged_part(parameter.grad), paged_part(parameter)
            if _C.is_managed(gradient) or why_not_pageable(gradient, self._engine.torch_device):
                continue
            if _C.is_managed(owner):
                self._engine.gradient_complete(owner, gradient)
                found_any |= _C.is_managed(gradient)
        return found_any

    def _adopt_states(self, optimizer: Optimizer) -> bool:
        """Page the states that neither a step nor a checkpoint brought; returns whether there were any."""
        found_any = False
        for parameter in _parameters(optimizer):
            if _C.is_managed(paged_part(parameter)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    found_any |= self._adopt_state(parameter, name, value)
        return found_any

    def _adopt_state(self, parameter: torch.Tensor, name: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        part = paged_part(value)
        if _C.is_managed(part) or why_not_pageable(part, self._engine.torch_device) is not None:
            return False
        label = f"{self._label_of(parameter) or 'parameter'}.{name}"
        return self._engine.manage(part, kind="state", label=label, anchor=paged_part(parameter))

    def _after_loading(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        result = original(optimizer, *args, **options)
        self._unfinished.pop(id(optimizer), None)
        if self._updates is not None:
            self._updates.loaded(optimizer)
        known = self._known.get(optimizer)
        if known is not None:
            known.is_settled = False
        return result

    def _page_loaded_state(
        self, original: Callable[..., Any], parameter: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        """Page a state that a checkpoint brings. One that became pages when it was read is copied: it was nobody's."""
        state = original(parameter, value, *args, **options)
        if not isinstance(state, torch.Tensor) or not _C.is_managed(paged_part(parameter)):
            return state
        name = str(args[2] if len(args) > 2 else options.get("key", "state"))
        if state not in self._unpickled:
            self._adopt_state(parameter, name, state)
            return state
        with torch.no_grad():
            own = torch.empty_like(state)
            self._adopt_state(parameter, name, own)
            return own.copy_(state)


def _signature(optimizer: Optimizer) -> Signature:
    """Return what changes when an optimizer gets other parameters or more states."""
    groups = tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)
    return (*groups, (0, len(optimizer.state)))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
