"""What autograd keeps for the backward pass becomes pages while a wrapped module runs forward."""

import contextlib
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from torch_offload import _C


class PagedActivations:
    """Saved-tensor hooks that are in place while a module runs, once however deep its calls nest.

    Threads: any; each has its own.
    """

    def __init__(self, engine: _C.Engine) -> None:
        """Hook nothing yet.

        Args:
            engine: Pages what is saved.
        """
        self._engine = engine
        self._calls = threading.local()

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        """Have them in place during each call of `module`, one that raises included."""
        return [
            module.register_forward_pre_hook(_Enter(self)),
            module.register_forward_hook(_Leave(self), always_call=True),
        ]

    def enter(self) -> None:
        """A call begins in this thread."""
        stack: list[saved_tensors_hooks | None] = self._calls.__dict__.setdefault("stack", [])
        if stack or torch.compiler.is_compiling():
            stack.append(None)
            return
        hooks = saved_tensors_hooks(self._engine.save_for_backward, _C.restore_for_backward)
        hooks.__enter__()
        stack.append(hooks)

    def leave(self) -> None:
        """The call ends."""
        stack: list[saved_tensors_hooks | None] = self._calls.__dict__.get("stack", [])
        hooks = stack.pop() if stack else None
        if hooks is not None:
            hooks.__exit__()
            self._engine.end_saving()


class _CallHook:
    """A copy of the module carries it along without effect; a pickle carries nothing of ours."""

    def __init__(self, activations: PagedActivations) -> None:
        self._activations = weakref.ref(activations)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CallHook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes whatever it is given and returns None: a hook that changes nothing, where torch_offload is absent too.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class _Enter(_CallHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        activations = self._activations()
        if activations is not None:
            activations.enter()


class _Leave(_CallHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        activations = self._activations()
        if activations is not None:
            activations.leave()
