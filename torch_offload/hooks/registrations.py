"""Torch's hooks on registration, handed on to listeners.

Torch walks its own hooks while it calls them, so none may be added by one that runs. A listener may: the engine opens
when the first large parameter arrives.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

OnTensor = Callable[[nn.Module, str, torch.Tensor, str], None]
"""Told of a tensor that is about to be registered: its module, its name there, it, its kind."""
OnSubmodule = Callable[[nn.Module, str, nn.Module], None]
"""Told of a module that is about to be registered: its parent, its name there, it."""


@dataclass(frozen=True)
class Listener:
    """Who is told."""

    on_tensor: OnTensor
    on_submodule: OnSubmodule | None = None


@dataclass
class _Hooks:
    """Installed while somebody listens. Listeners are called in the order of their numbers."""

    listeners: dict[int, Listener] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def install(self) -> None:
        self.handles = [
            register_module_parameter_registration_hook(self.on_parameter),
            register_module_buffer_registration_hook(self.on_buffer),
            register_module_module_registration_hook(self.on_submodule),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def on_parameter(self, module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        self.on_tensor(module, name, parameter, "parameter")

    def on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        self.on_tensor(module, name, buffer, "other")

    def on_tensor(self, module: nn.Module, name: str, tensor: torch.Tensor | None, kind: str) -> None:
        if tensor is not None:
            for listener in list(self.listeners.values()):
                listener.on_tensor(module, name, tensor, kind)

    def on_submodule(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        for listener in list(self.listeners.values()):
            if submodule is not None and listener.on_submodule is not None:
                listener.on_submodule(module, name, submodule)


_HOOKS = _Hooks()


class Listening:
    """Ends with :meth:`remove`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def remove(self) -> None:
        """Tell this listener nothing any more. Safe to call twice."""
        if _HOOKS.listeners.pop(self._number, None) is not None and not _HOOKS.listeners:
            _HOOKS.remove()


def listen(listener: Listener) -> Listening:
    """Tell `listener` of every registration from now on, in whatever module; not of one that is under way.

    Threads: one at a time.
    """
    if not _HOOKS.listeners:
        _HOOKS.install()
    number = next(_HOOKS.numbers)
    _HOOKS.listeners[number] = listener
    return Listening(number)
