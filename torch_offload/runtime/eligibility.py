"""Eligibility of tensors for paging."""

from collections.abc import Iterable

import torch
from torch import nn

from torch_offload import _C, _compat
from torch_offload.errors import UnsupportedModelError
from torch_offload.runtime.tensor_parts import is_ordinary


def why_not_pageable(tensor: torch.Tensor, compute_device: str = "cpu") -> str | None:
    """Return the reason why a tensor cannot be paged, such as ``is on device cuda:1``, or None where it can.

    Args:
        tensor: Any. What is made of others cannot be paged itself; ask for its parts.
        compute_device: Where the module computes. A tensor may be there or on the CPU.
    """
    if not is_ordinary(tensor):
        kind = type(tensor)
        return f"is a {kind.__module__}.{kind.__qualname__}, a subclass of Tensor whose memory is not known"
    if tensor.device.type != "cpu" and str(tensor.device) != compute_device:
        return f"is on device {tensor.device}"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}"
    if not _C.has_storage(tensor):
        return "has no memory of its own"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype})"
    if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
        return "is in memory shared with other processes"
    return None


def check_engine(module: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse a module whose parameters another engine has than `fully_shard`.

    Args:
        module: Any. One of such an engine is refused, too.
        parameters: Its own, those that it had included: an engine may have put others in their place.

    Raises:
        UnsupportedModelError: The message names that engine and what to use.
    """
    named = next(filter(None, map(_compat.other_engine_of, [*module.modules(), *parameters])), None)
    if named is not None:
        raise UnsupportedModelError(
            f"{named} has the parameters of this {type(module).__name__} in memory of its own, which cannot be paged; "
            "divide them with torch.distributed.fsdp.fully_shard (FSDP2), or train without torch_offload"
        )
