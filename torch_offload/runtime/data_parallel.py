"""What ``DistributedDataParallel`` does when it is made, in pieces that a budget has room for."""

from typing import Any

import torch

from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches

BROADCAST_BYTES = 1 << 20
"""Of a piece of the model that the first rank sends to the others. The same for every budget: all ranks have to cut the
model alike."""


def broadcast_in_small_pieces(patches: Patches) -> None:
    """Replace what ``DistributedDataParallel`` begins with, where torch has it."""
    if torch.distributed.is_available():
        patches.replace(replaced_functions.DATA_PARALLEL_START, _sync_in_small_pieces)


def _sync_in_small_pieces(
    original: Any, module: Any, process_group: Any, broadcast_bucket_size: int, *args: Any, **options: Any
) -> Any:
    return original(module, process_group, min(broadcast_bucket_size, BROADCAST_BYTES), *args, **options)
