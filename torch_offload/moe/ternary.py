"""Matrices as scaled ternary ones: ``W ~ diag(row_scale) @ T @ diag(column_scale)``, and sums of such."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_offload.errors import UnsupportedModelError
from torch_offload.moe.operators import encode

SCALE_DTYPE = torch.bfloat16
"""Of scales that are kept."""

COLUMN_CLASSES = 4
"""Into which columns are sorted by their odds: more of them save less than their tables take (docs/adr/0007)."""


@dataclass(frozen=True)
class TernaryMatrix:
    """One term. ``values`` int8 [rows, columns] of -1, 0 and +1, ``row_scale`` [rows], ``column_scale`` [columns]."""

    values: Tensor
    row_scale: Tensor
    column_scale: Tensor

    def dense(self) -> Tensor:
        """The matrix, float32."""
        return self.row_scale.float()[:, None] * self.values * self.column_scale.float()


def nearest(weight: Tensor, *, zeros: float) -> TernaryMatrix:
    """Round a matrix row by row: the smallest share becomes zero, the rest their mean magnitude with its sign.

    The scale is the one with the least squared error for these zeros.

    Args:
        weight: Floats [rows, columns].
        zeros: The share that becomes zero, 0 to 1.

    Raises:
        UnsupportedModelError: If a weight is not finite.
    """
    exact = weight.detach().float()
    check_finite(exact)
    magnitude = exact.abs()
    kept_count = round((1 - zeros) * weight.shape[1])
    kept = torch.zeros_like(magnitude, dtype=torch.bool)
    kept.scatter_(1, magnitude.topk(kept_count, dim=1).indices, value=True)
    kept &= magnitude > 0
    values = torch.where(kept, exact.sign(), 0).to(torch.int8)
    row_scale = torch.where(kept, magnitude, 0).sum(1) / kept.sum(1).clamp(min=1)
    return TernaryMatrix(values, row_scale.to(SCALE_DTYPE), torch.ones(weight.shape[1], dtype=SCALE_DTYPE))


def in_planes(weight: Tensor, zeros: Sequence[float]) -> list[TernaryMatrix]:
    """Round a matrix, then what is left of it, and so on: one term for each share of zeros."""
    terms: list[TernaryMatrix] = []
    rest = weight.detach().float()
    for share in zeros:
        terms.append(nearest(rest, zeros=share))
        rest = rest - terms[-1].dense()
    return terms


def check_finite(weight: Tensor) -> None:
    """Check that every weight is finite.

    Raises:
        UnsupportedModelError: If one is not; the message says how many are not and where the first is.
    """
    wrong = ~weight.isfinite()
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise UnsupportedModelError(
            f"{int(wrong.sum())} of {weight.numel()} weights are not finite, the first at {first}"
        )


def coded(matrix: TernaryMatrix, *, coder: str = "smallest") -> Tensor:
    """Code the values of a matrix. TUN12 is for speed, which its tables of several classes would take away."""
    return encode(matrix.values, coder=coder, most_classes=1 if coder == "tun12" else COLUMN_CLASSES)
