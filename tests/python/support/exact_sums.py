"""Products of coded matrices by the definition (csrc/codec/fixed_point.h), in plain torch on the CPU."""

import torch
from torch import Tensor

PLANES = {torch.float32: 4, torch.bfloat16: 3, torch.float16: 3}


def product(x: Tensor, weight: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Multiply `x` [tokens, columns] by T = `weight` [rows, columns]; scales are of the columns and of the rows.

    All sums are integers below 2^53, so float64 has them exactly in any order.
    """
    scaled = x.float() * before
    most = scaled.abs().amax(dim=1, keepdim=True).view(torch.int32)
    shift = (8 * PLANES[x.dtype] - 2 - ((most >> 23) - 126)).double()
    is_finite = most < 0x7F800000
    integers = torch.where(is_finite, (scaled.double() * 2**shift).round(), 0.0)
    sums = integers @ weight.double().T + 0.0  # no negative zeros, which integers do not have
    worth = (sums.float().double() * 2**-shift).float() * after
    return torch.where(is_finite, worth, torch.nan).to(x.dtype)
