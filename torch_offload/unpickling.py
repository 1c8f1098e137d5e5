"""Unpickling files larger than the budget: what is unpickled is paged once ordinary copies take up too much of it.

A resumed run reads all moments at once before the optimizer gets them. Below the share they stay ordinary tensors,
which a forked process can read.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._utils

from torch_offload import _C
from torch_offload.patches import Patches
from torch_offload.tracking import refusal

ORDINARY_SHARE = 4
"""Temporaries may take one part in so many of the budget before loaded tensors are paged."""


def install(patches: Patches, engine: _C.Engine, *, budget_bytes: int) -> None:
    """Replace the function through which every unpickled tensor gets its storage, looked up at each call."""
    page = functools.partial(_page_beyond, engine, budget_bytes // ORDINARY_SHARE, os.getpid())
    patches.replace(torch._utils, "_rebuild_tensor", page)


def _page_beyond(
    engine: _C.Engine, ordinary_bytes: int, process: int, original: Callable[..., Any], storage: Any, *args: Any
) -> torch.Tensor:
    tensor: torch.Tensor = original(storage, *args)
    if os.getpid() != process or refusal(tensor) is not None:
        return tensor
    memory: Any = engine.statistics()["memory"]
    if memory["range_bytes"] + memory["small_bytes"] > ordinary_bytes:
        engine.manage(tensor, kind="other", label="loaded tensor")
    return tensor
