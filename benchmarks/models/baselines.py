"""Experts of a model made smaller in the ways that are compared; each returns the bits per weight it took."""

import itertools
from collections.abc import Sequence

import torch
from models.trained_experts import Rows
from torch import Tensor, nn

import torch_offload
from torch_offload.compression import gptq
from torch_offload.compression.input_moments import moments_of
from torch_offload.compression.layerwise import BlockWalk, block_of
from torch_offload.moe import operators, ternary
from torch_offload.moe.layouts import experts_of
from torch_offload.moe.modules import DOWN, UP

SCALE_BITS = 16
CALIBRATED_AT_ONCE = 8  # rows

Rounded = tuple[Tensor, int]
"""What stands for a matrix [rows, columns], and the bytes that takes."""


def keep(model: nn.Module, rows: Rows) -> float:
    """Leave experts as they are, in bfloat16."""
    return 16.0


def zero(model: nn.Module, rows: Rows) -> float:
    """Have all experts say nothing."""
    with torch.no_grad():
        for experts in experts_of(model):
            for expert in range(experts.shapes.count):
                experts.weight(expert, DOWN).zero_()
    return 0.0


def ours(model: nn.Module, rows: Rows, *, bits: float) -> float:
    """The compressor of this project; the model runs on coded experts. Everything in the file counts."""
    return torch_offload.compress(model, bits=bits, calibration=_batches(rows, model)).bits


def qmoe(model: nn.Module, rows: Rows, *, is_by_length: bool) -> float:
    """QMoE's rounding with its dictionary coder; each layer is given what the rounded ones before it say, as ours.

    Moments of experts that saw few tokens are filled up from the layer's, as ours. As published, long tokens count more
    (`is_by_length`); with ours each token counts the same.
    """
    walk = BlockWalk(model, _batches(rows, model))
    rounding = _Rounding()
    with torch.no_grad():
        for experts in experts_of(model):
            block = block_of(experts.name, model)
            seen = moments_of([experts], lambda block=block: walk.run(block), is_by_length=is_by_length)
            (moments,) = seen.values()
            for matrix in (UP, DOWN):
                for expert in range(experts.shapes.count):
                    weight = experts.weight(expert, matrix)
                    rounding.put(weight, qmoe_rounded(weight.float(), moments.means(matrix, [expert])[0]))
            walk.go_past(block)
    return rounding.bits


def nearest(model: nn.Module, rows: Rows, *, zeros: float) -> float:
    """Each row's smallest values become zero, the rest plus or minus their mean; coded by our coder."""
    rounding = _Rounding()
    with torch.no_grad():
        for experts in experts_of(model):
            for matrix, expert in itertools.product((UP, DOWN), range(experts.shapes.count)):
                weight = experts.weight(expert, matrix)
                rounding.put(weight, nearest_rounded(weight.float(), zeros))
    return rounding.bits


class _Rounding:
    """Matrices that were replaced, and the bytes that stand for them."""

    def __init__(self) -> None:
        self._taken_bytes = 0
        self._weights = 0

    def put(self, weight: Tensor, rounded: Rounded) -> None:
        """Replace a matrix."""
        dense, size_bytes = rounded
        weight.copy_(dense)
        self._taken_bytes += size_bytes
        self._weights += weight.numel()

    @property
    def bits(self) -> float:
        """Per weight."""
        return self._taken_bytes * 8 / self._weights


def _batches(rows: Rows, model: nn.Module) -> list[dict[str, Tensor]]:
    return [part.inputs(model) for part in rows.split(CALIBRATED_AT_ONCE)]


def qmoe_rounded(weight: Tensor, moment: Tensor) -> Rounded:
    rounded = gptq.qmoe_quantize(weight, moment)
    return rounded.dense(), rounded.coded_bytes


def nearest_rounded(weight: Tensor, zeros: float) -> Rounded:
    term = ternary.nearest(weight, zeros=zeros)
    return term.dense(), coded_bytes([term])


def coded_bytes(terms: Sequence[ternary.TernaryMatrix]) -> int:
    """Extents and scales of a matrix; what fills pages is left out, as for QMoE."""
    return sum(
        operators.extents(ternary.coded(term))[0].coded_bytes
        + (len(term.row_scale) + len(term.column_scale)) * SCALE_BITS // 8
        for term in terms
    )
