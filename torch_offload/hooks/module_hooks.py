"""Hooks on modules that a copy of the module carries along without effect and a pickle leaves behind."""

import contextlib
import weakref
from typing import Any, Generic, TypeVar

from torch import nn

Owner = TypeVar("Owner")


class ModuleHook(Generic[Owner]):
    """Calls :meth:`run` with its owner as long as that is alive."""

    def __init__(self, owner: Owner) -> None:
        """Hold the owner weakly."""
        self._owner = weakref.ref(owner)

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], more: Any = None) -> None:
        """Be a forward pre-hook, with keyword arguments or without, or a forward hook; changes nothing."""
        owner = self._owner()
        if owner is not None:
            self.run(owner, module, arguments, more)

    def run(self, owner: Owner, module: nn.Module, arguments: tuple[Any, ...], more: Any) -> None:
        """Do what the hook is for.

        Args:
            owner: What the hook was made for.
            module: What is called.
            arguments: The positional arguments of the call.
            more: Of a pre-hook its keyword arguments, if it asked for them; of a hook the output.
        """
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleHook[Owner]":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes whatever it is given and returns None: a hook that changes nothing, where torch_offload is absent too.
        return (getattr, (contextlib.nullcontext(), "__exit__"))
