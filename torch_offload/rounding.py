"""Rounding matrices to ternary with given steps: error fed back column by column, then sweeps.

Columns are rounded one after the other and what is left over is moved to those that follow (GPTQ); each has a step of
its own, and a dead zone that weighs error against bits. Sweeps then give each value another choice with all others
fixed. Matrices of one shape are rounded together, in float32.

Source: Frantar et al., "GPTQ", ICLR 2023; steps by the factor's diagonal after "WaterSIC".
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_offload.ternary import SCALE_DTYPE, TernaryMatrix

LOG = logging.getLogger(__name__)

_BLOCK = 32


@dataclass(frozen=True)
class Problem:
    """Matrices to round, and what their inputs are like.

    Attributes:
        rest: What is to be approximated, [matrices, columns, rows]: a column of a weight lies side by side.
        hessian: Damped, [matrices, columns, columns].
        factor: Upper Cholesky factor of its inverse.
        damping: What was added to the diagonal, [matrices].
    """

    rest: Tensor
    hessian: Tensor
    factor: Tensor
    damping: Tensor

    @classmethod
    def make(cls, weights: Tensor, hessians: Tensor | None, *, damping: float) -> "Problem":
        """Take [matrices, rows, columns] and the second moments of their inputs."""
        columns = weights.shape[2]
        rest = weights.detach().float().transpose(1, 2).contiguous()
        if hessians is None:
            hessians = torch.eye(columns).expand(len(weights), -1, -1)
        added = damping * hessians.diagonal(dim1=1, dim2=2).mean(1)
        damped = hessians.float() + torch.eye(columns) * added[:, None, None]
        lower, status = torch.linalg.cholesky_ex(damped)
        unusable = (status != 0) | ~lower.isfinite().all((1, 2))
        if unusable.any():
            LOG.warning("%d of %d Hessians cannot be factored; errors are weighed alike", unusable.sum(), len(rest))
            identity = torch.eye(columns)
            damped = torch.where(unusable[:, None, None], identity, damped)
            lower = torch.where(unusable[:, None, None], identity, lower)
            added = torch.where(unusable, 0, added)
        factor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        return cls(rest, damped, factor, added)

    def take(self, positions: Tensor, *, most_rows: int | None = None) -> "Problem":
        """Return some of the matrices, with at most so many of their rows, evenly spread."""
        rest = self.rest[positions]
        if most_rows is not None and rest.shape[2] > most_rows:
            spread = torch.linspace(0, rest.shape[2] - 1, most_rows).round().long()
            rest = rest[:, :, spread].contiguous()
        return Problem(rest, self.hessian[positions], self.factor[positions], self.damping[positions])

    def without(self, terms: Sequence[TernaryMatrix]) -> "Problem":
        """Return what is left when a term of each matrix is taken away."""
        dense = torch.stack([term.dense().T for term in terms])
        return Problem(self.rest - dense, self.hessian, self.factor, self.damping)

    def less(self, rounded: "Rounded") -> "Problem":
        """Return what is left when what it was rounded to is taken away."""
        dense = rounded.values * rounded.column_scale[:, :, None] * rounded.row_scale[:, None]
        return Problem(self.rest - dense, self.hessian, self.factor, self.damping)

    def energy(self) -> Tensor:
        """Energy of the output of each matrix, without what damping adds."""
        damped = (self.rest * (self.hessian @ self.rest)).sum((1, 2))
        return (damped - self.damping * self.rest.square().sum((1, 2))).clamp(min=0)


@dataclass(frozen=True)
class Setting:
    """How matrices are rounded, one number each. ``step`` as a multiple of a row's root mean square."""

    step: Tensor
    dead_zone: Tensor

    def replaced(self, where: Tensor, other: "Setting") -> "Setting":
        """Return this with the numbers of another one where a mask says so."""
        return Setting(torch.where(where, other.step, self.step), torch.where(where, other.dead_zone, self.dead_zone))


@dataclass(frozen=True)
class Rounded:
    """Values [matrices, columns, rows] as floats, and the scales that go with them."""

    values: Tensor
    row_scale: Tensor
    column_scale: Tensor

    def term(self, position: int) -> TernaryMatrix:
        return TernaryMatrix(
            self.values[position].T.to(torch.int8).contiguous(),
            self.row_scale[position].to(SCALE_DTYPE),
            self.column_scale[position].to(SCALE_DTYPE),
        )


def round_with(problem: Problem, setting: Setting, *, sweeps: int) -> Rounded:
    """Round with given steps.

    Columns whose error counts much get smaller steps: between one step for all, which is the best for few values in
    one class, and steps as the factor's diagonal, which is the best for many values in a class each.
    """
    norm = problem.rest.square().mean(1).sqrt()
    rest = problem.rest / torch.where(norm > 0, norm, 1)[:, None]
    diagonal = problem.factor.diagonal(dim1=1, dim2=2)
    mean = diagonal.log().mean(1).exp()[:, None]
    relative = diagonal / mean
    step = setting.step[:, None] * relative.sqrt()
    # What a value costs beside its error: `price` times its bits. A unit of error counts 1 / factor^2 here.
    price = (setting.dead_zone * setting.step.square())[:, None]
    values = _feed_back(rest, problem.factor, step, step / 2 + price * relative.square() / step)
    counts = problem.hessian.diagonal(dim1=1, dim2=2) * mean.square()
    for _ in range(sweeps):
        values = _sweep(rest, values, problem.hessian, step, step / 2 + price / (counts * step))
    return Rounded(values, norm * _best_scale(problem.hessian, rest, values * step[:, :, None]), step)


def _feed_back(rest: Tensor, factor: Tensor, step: Tensor, threshold: Tensor) -> Tensor:
    """Round column by column and move each error to the columns behind, a block at a time to those beyond it."""
    rest = rest.clone()
    columns = rest.shape[1]
    values = torch.zeros_like(rest)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        errors = torch.empty_like(rest[:, begin:end])
        for column in range(begin, end):
            value = _decide(rest[:, column], threshold[:, column, None])
            error = (rest[:, column] - value * step[:, column, None]) / factor[:, column, column, None]
            rest[:, column + 1 : end].addcmul_(factor[:, column, column + 1 : end, None], error[:, None], value=-1)
            values[:, column] = value
            errors[:, column - begin] = error
        rest[:, end:].baddbmm_(factor[:, begin:end, end:].transpose(1, 2), errors, alpha=-1)
    return values


def _sweep(rest: Tensor, values: Tensor, hessian: Tensor, step: Tensor, threshold: Tensor) -> Tensor:
    """Choose each value again, given all others; the gradient of the error is kept up to date by blocks."""
    values = values.clone()
    gradient = hessian @ (rest - values * step[:, :, None])
    columns = rest.shape[1]
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        changes = torch.empty_like(rest[:, begin:end])
        for column in range(begin, end):
            wide = step[:, column, None]
            wanted = values[:, column] * wide + gradient[:, column] / hessian[:, column, column, None]
            value = _decide(wanted, threshold[:, column, None])
            change = (value - values[:, column]) * wide
            gradient[:, column + 1 : end].addcmul_(
                hessian[:, column, column + 1 : end, None], change[:, None], value=-1
            )
            values[:, column] = value
            changes[:, column - begin] = change
        gradient[:, end:].baddbmm_(hessian[:, end:, begin:end], changes, alpha=-1)
    return values


def _decide(wanted: Tensor, threshold: Tensor) -> Tensor:
    return wanted.sign() * (wanted.abs() > threshold)


def _best_scale(hessian: Tensor, rest: Tensor, rounded: Tensor) -> Tensor:
    """Return for each row the factor of its rounded values with the least error, [matrices, rows]."""
    product = hessian @ rounded
    scale: Tensor = (rest * product).sum(1) / (rounded * product).sum(1).clamp(min=1e-30)
    return torch.where(rounded.any(1), scale, 0)
