"""Weights of 4 bits in a trace: what stands for their statistics, and what their products consist of."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from torch_offload.errors import UnsupportedModelError
from torch_offload.runtime.tensor_parts import PLAIN, is_not_quantized_yet, is_of_4_bits

_STATISTICS = ("absmax", "code", "offset")


def check_can_be_traced(name: str, tensor: Tensor) -> None:
    """Refuse a parameter or buffer whose bytes are unknown to a trace.

    Raises:
        UnsupportedModelError: For another tensor subclass than bitsandbytes' of 4 bits.
    """
    if type(tensor) in PLAIN or (is_of_4_bits(tensor) and not is_not_quantized_yet(tensor)):
        return
    state = ", not quantized yet" if is_not_quantized_yet(tensor) else ""
    raise UnsupportedModelError(
        f"{name} is a {type(tensor).__name__}{state}, which cannot be planned: of quantized models only bitsandbytes' "
        "of 4 bits can, once loaded; give a plain one"
    )


def check_can_run_forward(model: nn.Module) -> None:
    """Refuse to plan passes without gradients of a model of 4 bits.

    Raises:
        UnsupportedModelError: For such a model: its first such pass packs its weights anew on some processors.
    """
    for name, parameter in model.named_parameters():
        if is_of_4_bits(parameter):
            raise UnsupportedModelError(
                f"{name} has 4 bits: only training can be planned with it, since bitsandbytes packs such weights anew "
                "in the first pass without gradients on some processors; plan training, or a plain model"
            )


def model_elements(tensor: Tensor) -> int:
    """Return how many numbers of the model a parameter or buffer holds."""
    state: Any = getattr(tensor, "quant_state", None) if is_of_4_bits(tensor) else None
    return tensor.numel() if state is None else torch.Size(state.shape).numel()


def stand_in_state(tensor: Tensor, stand_in_for: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of what goes with a weight of 4 bits, of stand-ins; None for other tensors."""
    return _copied(getattr(tensor, "quant_state", None), stand_in_for) if is_of_4_bits(tensor) else None


def _copied(state: Any, stand_in_for: Callable[[Tensor], Tensor]) -> Any:
    if state is None:
        return None
    copied = copy.copy(state)
    given = {name: value for name in _STATISTICS if isinstance(value := getattr(state, name), Tensor)}
    copied.__dict__.update({name: stand_in_for(value) for name, value in given.items()})
    copied.state2 = _copied(state.state2, stand_in_for)
    return copied


def without_bytes(tensor: Tensor) -> Tensor:
    """Return the same weight of 4 bits on the meta device."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made: Any = meta.as_subclass(type(tensor))
    made.__dict__.update(tensor.__dict__)
    made.quant_state = stand_in_state(tensor, lambda part: part.to("meta"))
    made.module = None  # of the original
    packed: Tensor = made
    return packed


def _product_of_4_bits(
    tokens: Tensor,
    weight: Tensor,
    shape: Any,
    absmax: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """The product as bitsandbytes computes it on processors, over a copy of the weight in the tokens' type."""
    packages: Any = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        wide = packages.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = wide + absmax_offset
    copied = packages.dequantize_4bit.default(weight, absmax, block, kind, shape, tokens.dtype)
    rows = tokens.reshape(-1, tokens.shape[-1])
    product = torch.mm(rows, copied.t()) if bias is None else torch.addmm(bias, rows, copied.t())
    return product.view(*tokens.shape[:-1], shape[0])


COMPOSITES: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"bitsandbytes.gemm_4bit": _product_of_4_bits})
"""Operators that call others on processors, by name, and what they call: these take memory in between."""
