"""Pages parameters and buffers as they are registered, so that the whole model is never resident."""

import os
import weakref

import torch
from torch import nn

from torch_offload import _C
from torch_offload.config import Config
from torch_offload.runtime import preflight
from torch_offload.runtime.eligibility import why_not_pageable
from torch_offload.runtime.provisional_layers import ProvisionalLayers
from torch_offload.runtime.tensor_parts import is_not_quantized_yet, is_ordinary, parts_of


class PendingModules:
    """Pages what is registered while it is open, and knows the modules that hold such tensors until they are wrapped.

    Threads: the one that builds modules.
    """

    def __init__(self, engine: _C.Engine, config: Config, provisional: ProvisionalLayers) -> None:
        """Page nothing before :meth:`open`.

        Args:
            engine: Pages the tensors.
            config: With the budget decided.
            provisional: Dense layers whose size does not count.
        """
        self._provisional = provisional
        self._engine = engine
        self._config = config
        self._openings = 0
        self._process = os.getpid()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_open(self) -> bool:
        """Whether tensors are paged as they arrive. Never in a forked child, which has no engine."""
        return self._openings > 0 and os.getpid() == self._process

    def open(self) -> None:
        """Page what arrives until :meth:`close` was called as often."""
        self._openings += 1

    def close(self) -> None:
        """Undo one :meth:`open`."""
        self._openings -= 1
        if self._openings == 0 and os.getpid() == self._process:
            self._engine.finish_loading()

    def is_idle(self) -> bool:
        """Whether it is closed and no module with such tensors is waiting to be wrapped."""
        return self._openings == 0 and not self._modules

    def is_waiting(self, module: nn.Module) -> bool:
        """Whether the module holds tensors that arrived and was not wrapped since."""
        return module in self._modules

    def has_waiting(self) -> bool:
        """Whether there is such a module."""
        return bool(self._modules)

    def leave(self, module: nn.Module) -> None:
        """The module belongs to a wrapped one now, or was unwrapped."""
        self._modules.discard(module)

    def take(self, module: nn.Module, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Page a tensor that is about to be registered. One without bytes yet is only asked for its size.

        Raises:
            OutOfTierMemory: If the budget is too small for it, before anything of it is read.
            TierIOError: If pages cannot be written.
        """
        for suffix, part in parts_of(tensor):
            self._take_part(module, f"{name}{suffix}", part, kind)

    def _take_part(self, module: nn.Module, name: str, tensor: torch.Tensor, kind: str) -> None:
        if not is_ordinary(tensor) or tensor.nbytes < max(self._config.min_paged_bytes, 1):
            return
        is_laid_out = tensor.device.type in ("cpu", "meta") and not self._provisional.include(tensor)
        if is_laid_out and not is_not_quantized_yet(tensor):
            preflight.check_laid_out(self._config, module, name, tensor)
        label = f"{type(module).__name__}.{name}"
        can_be = why_not_pageable(tensor, self._engine.torch_device) is None
        if can_be and self._engine.manage(tensor, kind=kind, label=label, of_module=True):
            self._modules.add(module)
