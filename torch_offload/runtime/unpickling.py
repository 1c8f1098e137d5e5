"""Unpickling files larger than the budget: what is unpickled is paged once ordinary copies take up too much of it.

A resumed run reads all moments at once before the optimizer gets them. Below the share they stay ordinary tensors,
which a forked process can read.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torch_offload import _C
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.runtime.eligibility import why_not_pageable

ORDINARY_SHARE = 4
"""Temporaries may take one part in so many of the budget before loaded tensors are paged."""


class UnpickledTensors:
    """Pages unpickled tensors beyond a share of the budget, and knows them by identity as long as they live.

    Threads: any that unpickle.
    """

    def __init__(self, engine: _C.Engine, *, budget_bytes: int) -> None:
        """Page nothing before :meth:`install`."""
        self._engine = engine
        self._ordinary_bytes = budget_bytes // ORDINARY_SHARE
        self._process = os.getpid()
        self._paged: dict[int, weakref.ref[torch.Tensor]] = {}

    def install(self, patches: Patches) -> None:
        """Replace the function through which every unpickled tensor gets its storage, looked up at each call."""
        patches.replace(replaced_functions.REBUILD_TENSOR, self._page_beyond)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was paged because a file brought it."""
        known = self._paged.get(id(tensor))
        return known is not None and known() is tensor

    def forget(self, tensor: torch.Tensor) -> None:
        """Know a tensor no more."""
        if tensor in self:
            del self._paged[id(tensor)]

    def _page_beyond(self, original: Callable[..., Any], storage: Any, *args: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(storage, *args)
        if os.getpid() != self._process or why_not_pageable(tensor) is not None:
            return tensor
        memory: Any = self._engine.statistics()["memory"]
        if memory["range_bytes"] + memory["small_bytes"] <= self._ordinary_bytes:
            return tensor
        if self._engine.manage(tensor, kind="other", label="loaded tensor"):
            key, paged = id(tensor), self._paged
            paged[key] = weakref.ref(tensor, lambda _: paged.pop(key, None))
        return tensor
