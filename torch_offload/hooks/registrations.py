"""Torch's hooks on registration, handed on to listeners.

Torch walks its own hooks while it calls them, so none may be added by one that runs. A listener may: the engine opens
when the first large parameter arrives.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

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


class Registrations:
    """Torch's registration hooks, installed while somebody listens.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}  # called in the order of their numbers
        self._handles: list[RemovableHandle] = []
        self._numbers = itertools.count()

    @property
    def installed_count(self) -> int:
        """The number of hooks that are installed; 0 while nobody listens."""
        return len(self._handles)

    def listen(self, listener: Listener) -> "Listening":
        """Tell `listener` of every registration in whatever module from the next one on."""
        if not self._listeners:
            self._handles = [
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_buffer_registration_hook(self._on_buffer),
                register_module_module_registration_hook(self._on_submodule),
            ]
        number = next(self._numbers)
        self._listeners[number] = listener
        return Listening(self, number)

    def remove(self, number: int) -> None:
        """Tell a listener nothing any more. Safe to call twice."""
        self._listeners.pop(number, None)
        if not self._listeners:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _on_parameter(self, module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        self._on_tensor(module, name, parameter, "parameter")

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        self._on_tensor(module, name, buffer, "other")

    def _on_tensor(self, module: nn.Module, name: str, tensor: torch.Tensor | None, kind: str) -> None:
        if tensor is not None:
            for listener in list(self._listeners.values()):
                listener.on_tensor(module, name, tensor, kind)

    def _on_submodule(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        for listener in list(self._listeners.values()):
            if submodule is not None and listener.on_submodule is not None:
                listener.on_submodule(module, name, submodule)


class Listening:
    """One listener of :class:`Registrations`, until :meth:`remove`."""

    def __init__(self, registrations: Registrations, number: int) -> None:
        self._registrations = registrations
        self._number = number

    def remove(self) -> None:
        """Tell this listener nothing any more. Safe to call twice."""
        self._registrations.remove(self._number)
