"""Experts of a model made smaller in the ways that are compared; each returns the bits per weight it took."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import torch_offload
from torch_offload import coded_linear, gptq, ternary
from torch_offload.block_walk import BlockWalk, block_of
from torch_offload.coded_experts import DOWN, UP
from torch_offload.expert_modules import experts_of
from torch_offload.expert_moments import moments_of

SCALE_BITS = 16

Rounder = Callable[[Tensor, Tensor], tuple[Tensor, int]]
"""A matrix [rows, columns] and the second moment of its inputs to what stands for it, and the bytes that takes."""


def zero(model: nn.Module) -> None:
    """Have all experts say nothing."""
    with torch.no_grad():
        for experts in experts_of(model):
            for expert in range(experts.shapes.count):
                experts.weight(expert, DOWN).zero_()


def ours(model: nn.Module, rows: Tensor, *, bits: float) -> float:
    """The compressor of this project; the model runs on coded experts. Everything in the file counts."""
    return torch_offload.compress(model, bits=bits, calibration=list(rows)).bits


def qmoe(model: nn.Module, rows: Tensor) -> float:
    """QMoE's rounding with its dictionary coder."""
    return _layer_by_layer(model, rows, qmoe_rounded)


def nearest(model: nn.Module, rows: Tensor, *, zeros: float) -> float:
    """Each row's smallest values become zero, the rest plus or minus their mean; coded by our coder."""
    return _layer_by_layer(model, rows, lambda weight, _: nearest_rounded(weight, zeros))


def qmoe_rounded(weight: Tensor, moment: Tensor) -> tuple[Tensor, int]:
    rounded = gptq.qmoe_quantise(weight, moment)
    return rounded.dense(), rounded.coded_bytes


def nearest_rounded(weight: Tensor, zeros: float) -> tuple[Tensor, int]:
    term = ternary.nearest(weight, zeros=zeros)
    return term.dense(), coded_bytes([term])


def coded_bytes(terms: Sequence[ternary.TernaryMatrix]) -> int:
    """Extents and scales of a matrix; what fills pages is left out, as for QMoE."""
    return sum(
        coded_linear.extents(coded_linear.encode(term.values))[0].coded_bytes
        + (len(term.row_scale) + len(term.column_scale)) * SCALE_BITS // 8
        for term in terms
    )


def _layer_by_layer(model: nn.Module, rows: Tensor, rounded: Rounder) -> float:
    """Round every expert in place; each layer is given what the rounded ones before it say, as with ours."""
    walk = BlockWalk(model, [{"input_ids": row[None]} for row in rows])
    taken_bytes, weights = 0, 0
    with torch.no_grad():
        for experts in experts_of(model):
            block = block_of(experts.name, model)
            (moments,) = moments_of([experts], lambda block=block: walk.run(block)).values()
            for matrix in (UP, DOWN):
                means = moments.means(matrix)
                for expert in range(experts.shapes.count):
                    weight = experts.weight(expert, matrix)
                    dense, size_bytes = rounded(weight.float(), means[expert])
                    weight.copy_(dense)
                    taken_bytes += size_bytes
                    weights += weight.numel()
            walk.go_past(block)
    return taken_bytes * 8 / weights
