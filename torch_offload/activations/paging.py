"""Makes pages of the tensors that autograd saves while a wrapped module runs forward."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from torch_offload import _C
from torch_offload.hooks.module_hooks import ModuleHook


class PagedActivations:
    """Saved-tensor hooks that are in place while a module runs, once however deep its calls nest.

    Threads: any; each has its own.
    """

    def __init__(self, engine: _C.Engine) -> None:
        """Install no hooks; :meth:`hook` does.

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
        """A call begins in this thread. Where others have hooks in place, as checkpointing has, those stay."""
        stack: list[saved_tensors_hooks | None] = self._calls.__dict__.setdefault("stack", [])
        if stack or torch.compiler.is_compiling() or not _C.may_hook_saved_tensors():
            stack.append(None)
            return
        hooks = saved_tensors_hooks(self._engine.save_for_backward, _C.restore_for_backward)
        hooks.__enter__()
        stack.append(hooks)

    def stand_aside(self, original: Callable[..., None], *args: Any) -> None:
        """Take the hooks out of the way of who forbids hooks on saved tensors for a while; torch refuses where any are.

        Args:
            original: `torch._C._autograd._saved_tensors_hooks_disable`.
            args: Its own.
        """
        stack: list[saved_tensors_hooks | None] = self._calls.__dict__.get("stack", [])
        hooks = next((hooks for hooks in stack if hooks is not None), None)
        if hooks is not None and _C.saved_tensor_hook_count() == 1:
            hooks.__exit__()
            self._calls.aside = hooks
        original(*args)

    def come_back(self, original: Callable[..., None]) -> None:
        """Put them in place again."""
        original()
        hooks: saved_tensors_hooks | None = self._calls.__dict__.pop("aside", None)
        if hooks is not None:
            hooks.__enter__()

    def leave(self) -> None:
        """The call ends."""
        stack: list[saved_tensors_hooks | None] = self._calls.__dict__.get("stack", [])
        hooks = stack.pop() if stack else None
        if hooks is not None:
            hooks.__exit__()
            self._engine.end_saving()


class _Enter(ModuleHook[PagedActivations]):
    def run(self, owner: PagedActivations, module: nn.Module, arguments: tuple[Any, ...], more: Any) -> None:
        owner.enter()


class _Leave(ModuleHook[PagedActivations]):
    def run(self, owner: PagedActivations, module: nn.Module, arguments: tuple[Any, ...], more: Any) -> None:
        owner.leave()
