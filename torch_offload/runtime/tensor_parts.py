"""The tensors that hold the bytes of a parameter or buffer: it alone, or what a quantized one is made of.

Packages are known by the names of their types, so that none is imported.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_offload._compat import paged_part

Parts = list[tuple[str, torch.Tensor]]
"""What to add to the name of a parameter, such as ``.absmax``, and the tensor that has bytes of its own."""

PLAIN = (torch.Tensor, nn.Parameter)
BITSANDBYTES = ("Params4bit", "Int8Params")
"""Parameters of bitsandbytes: tensors as all others, with attributes."""


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether the tensor itself is memory that operators see as it is, not one that is made of others."""
    return type(tensor) in PLAIN or _is_of_bitsandbytes(tensor)


def is_not_quantized_yet(tensor: torch.Tensor) -> bool:
    """Whether a parameter of bitsandbytes still has the size of what it is to be made of."""
    if not _is_of_bitsandbytes(tensor):
        return False
    known: Any = tensor
    return not known.bnb_quantized if is_of_4_bits(tensor) else tensor.dtype != torch.int8


def is_of_4_bits(value: object) -> bool:
    """Whether it is a ``Params4bit`` of bitsandbytes."""
    return type(value).__name__ == "Params4bit" and _package_of(value) == "bitsandbytes"


def parts_of(tensor: torch.Tensor) -> Parts:
    """Return the tensors that hold the bytes of one: itself first, if it has any.

    For a ``Params4bit`` or ``Int8Params`` of bitsandbytes also its statistics of blocks or rows; tables that all layers
    share and numbers stay with their owners. For a subclass of torchao what its ``__tensor_flatten__`` names, and what
    that is made of. For a DTensor this rank's part. A subclass that is not known is returned as it is.
    """
    if type(tensor) in PLAIN:
        return [("", tensor)]
    if (part := paged_part(tensor)) is not tensor:
        return parts_of(part)
    if _is_of_bitsandbytes(tensor):
        state = getattr(tensor, "quant_state", None)
        return [("", tensor), *_tensors_in(tensor, ("CB", "SCB")), *_statistics_of(state)]
    if _package_of(tensor) == "torchao" and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [(f".{name}{suffix}", part) for name in names for suffix, part in parts_of(getattr(tensor, name))]
    return [("", tensor)]


def parts_beside(module: nn.Module) -> Parts:
    """Return the tensors that a quantized layer keeps outside of its parameters and buffers.

    ``Linear8bitLt`` of bitsandbytes moves what its parameter held to its ``state``; ``HQQLinear`` of hqq has scales and
    zeros in its ``meta``.
    """
    package, kind = _package_of(module), type(module).__name__
    if package == "bitsandbytes" and kind == "Linear8bitLt":
        return [(f".state{suffix}", part) for suffix, part in _tensors_in(module.state, ("CB", "SCB"))]
    if package == "hqq" and kind == "HQQLinear" and isinstance(module.meta, dict):
        return [(f".meta.{name}", value) for name, value in module.meta.items() if isinstance(value, torch.Tensor)]
    return []


def all_parts_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Parts:
    """Return the parts of named tensors under their full names."""
    return [(f"{name}{suffix}", part) for name, tensor in tensors for suffix, part in parts_of(tensor)]


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_of_bitsandbytes(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ in BITSANDBYTES and _package_of(tensor) == "bitsandbytes"


def _tensors_in(owner: object, names: Iterable[str]) -> Parts:
    found = ((name, getattr(owner, name, None)) for name in names)
    return [(f".{name}", value) for name, value in found if isinstance(value, torch.Tensor)]


def _statistics_of(state: Any) -> Parts:
    """The largest magnitudes of blocks; in two levels where those are quantized themselves."""
    if state is None:
        return []
    nested = _tensors_in(getattr(state, "state2", None), ("absmax",))
    return [*_tensors_in(state, ("absmax",)), *((f".nested{suffix}", part) for suffix, part in nested)]
