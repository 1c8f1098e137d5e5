"""Waits for other ranks: counted as what they are, and used for deferred updates."""

from typing import Any

import torch

from torch_offload import _C
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches


def note_waits(patches: Patches, engine: _C.Engine) -> None:
    """Tell the engine when a thread of the program waits until a collective or a message has ended.

    What waits in C++ is not seen here: for ``DistributedDataParallel``, which does at the end of a backward, the engine
    tells itself.
    """

    def wait(original: Any, work: Any, *args: Any, **options: Any) -> Any:
        with engine.waits_for_ranks():
            return original(work, *args, **options)

    if torch.distributed.is_available():
        patches.replace(replaced_functions.COLLECTIVE_WAIT, wait)
