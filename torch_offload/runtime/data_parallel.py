"""What ``DistributedDataParallel`` takes beside the module, in a budget: weights to begin with, and buckets."""

import weakref
from typing import Any

import torch

from torch_offload import _C
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches

BROADCAST_BYTES = 1 << 20
"""Of a piece of the model that the first rank sends to the others. The same for every budget: all ranks have to cut the
model alike."""


def broadcast_in_small_pieces(patches: Patches) -> None:
    """Replace what ``DistributedDataParallel`` begins with, where torch has it."""
    if torch.distributed.is_available():
        patches.replace(replaced_functions.DATA_PARALLEL_START, _sync_in_small_pieces)


def page_buckets(patches: Patches, engine: _C.Engine) -> None:
    """Have the buckets in which gradients are reduced be pages of `engine`, which pages modules on the CPU.

    What they hold is written by each backward, and is worth nothing from the next step on, unless the gradients are
    views of them.
    """
    holding: weakref.WeakSet[Any] = weakref.WeakSet()  # reducers whose buckets hold the gradients

    def make(original: Any, module: Any, *args: Any, **options: Any) -> Any:
        with engine.pages_buckets(holds_gradients=module.gradient_as_bucket_view):
            result = original(module, *args, **options)
        if module.gradient_as_bucket_view:
            holding.add(module.reducer)
        return result

    def rebuild(original: Any, reducer: Any) -> Any:
        with engine.pages_buckets(holds_gradients=reducer in holding):
            return original(reducer)

    if torch.distributed.is_available() and engine.torch_device == "cpu":
        patches.replace(replaced_functions.DATA_PARALLEL_BUCKETS, make)
        patches.replace(replaced_functions.DATA_PARALLEL_REBUILT, rebuild)


def _sync_in_small_pieces(
    original: Any, module: Any, process_group: Any, broadcast_bucket_size: int, *args: Any, **options: Any
) -> Any:
    return original(module, process_group, min(broadcast_bucket_size, BROADCAST_BYTES), *args, **options)
