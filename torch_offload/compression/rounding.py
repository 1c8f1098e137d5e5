"""Rounding matrices to ternary with given steps: error fed back column by column, then sweeps.

Columns are rounded one after the other and what is left over is moved to those that follow (GPTQ); each has a step of
its own, and a dead zone that weighs error against bits. Sweeps then give each value another choice with all others
fixed. Matrices of one shape are rounded together, in float32, by kernels of csrc/codec/error_feedback.h.

Source: Frantar et al., "GPTQ", ICLR 2023; steps by the factor's diagonal after "WaterSIC".
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_offload import _C as _C  # the operators are defined in it
from torch_offload.moe.ternary import SCALE_DTYPE, TernaryMatrix

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantProblem:
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
    def make(cls, weights: Tensor, hessians: Tensor | None, *, damping: float) -> "QuantProblem":
        """Take [matrices, rows, columns] and the second moments of their inputs."""
        columns = weights.shape[2]
        rest = weights.detach().float().transpose(1, 2).contiguous()
        if hessians is None:
            hessians = torch.eye(columns).expand(len(weights), -1, -1)
        added = damping * hessians.diagonal(dim1=1, dim2=2).mean(1)
        damped = hessians.float() + torch.eye(columns) * added[:, None, None]
        factor, status = _factor_of_inverse(damped)
        unusable = (status != 0) | ~factor.isfinite().all((1, 2))
        if unusable.any():
            logger.warning("%d of %d Hessians cannot be factored; errors are weighed alike", unusable.sum(), len(rest))
            identity = torch.eye(columns)
            damped = torch.where(unusable[:, None, None], identity, damped)
            factor = torch.where(unusable[:, None, None], identity, factor)
            added = torch.where(unusable, 0, added)
        return cls(rest, damped, factor, added)

    def take(self, positions: Tensor, *, most_rows: int | None = None) -> "QuantProblem":
        """Return some of the matrices, with at most so many of their rows, evenly spread."""
        rest = self.rest[positions]
        if most_rows is not None and rest.shape[2] > most_rows:
            spread = torch.linspace(0, rest.shape[2] - 1, most_rows).round().long()
            rest = rest[:, :, spread].contiguous()
        return QuantProblem(rest, self.hessian[positions], self.factor[positions], self.damping[positions])

    def without(self, terms: Sequence[TernaryMatrix]) -> "QuantProblem":
        """Return what is left when a term of each matrix is taken away."""
        dense = torch.stack([term.dense().T for term in terms])
        return QuantProblem(self.rest - dense, self.hessian, self.factor, self.damping)

    def less(self, rounded: "Rounded") -> "QuantProblem":
        """Return what is left when what it was rounded to is taken away."""
        dense = rounded.values * rounded.column_scale[:, :, None] * rounded.row_scale[:, None]
        return QuantProblem(self.rest - dense, self.hessian, self.factor, self.damping)

    def energy(self) -> Tensor:
        """Energy of the output of each matrix, without what damping adds."""
        damped = (self.rest * (self.hessian @ self.rest)).sum((1, 2))
        return (damped - self.damping * self.rest.square().sum((1, 2))).clamp(min=0)


@dataclass(frozen=True)
class StepAndDeadZone:
    """Step and dead zone of each matrix; a step is a multiple of a row's root mean square."""

    step: Tensor
    dead_zone: Tensor

    def replaced(self, where: Tensor, other: "StepAndDeadZone") -> "StepAndDeadZone":
        """Return this with the numbers of another one where a mask says so."""
        return StepAndDeadZone(
            torch.where(where, other.step, self.step), torch.where(where, other.dead_zone, self.dead_zone)
        )


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


def round_with(problem: QuantProblem, pair: StepAndDeadZone, *, sweeps: int) -> Rounded:
    """Round with given steps.

    Columns whose error counts much get smaller steps: between one step for all, which is the best for few values in
    one class, and steps as the factor's diagonal, which is the best for many values in a class each.
    """
    norm = problem.rest.square().mean(1).sqrt()
    rest = problem.rest / torch.where(norm > 0, norm, 1)[:, None]
    diagonal = problem.factor.diagonal(dim1=1, dim2=2)
    mean = diagonal.log().mean(1).exp()[:, None]
    relative = diagonal / mean
    step = pair.step[:, None] * relative.sqrt()
    # What a value costs beside its error: `price` times its bits. A unit of error counts 1 / factor^2 here.
    price = (pair.dead_zone * pair.step.square())[:, None]
    operators = torch.ops.torch_offload
    threshold = step / 2 + price * relative.square() / step
    values = operators.round_with_feedback(rest, problem.factor, step, threshold)
    counts = problem.hessian.diagonal(dim1=1, dim2=2) * mean.square()
    threshold = step / 2 + price / (counts * step)
    for _ in range(sweeps):
        values = operators.refine(rest, values, problem.hessian, step, threshold)
    return Rounded(values, norm * _best_scale(problem.hessian, rest, values * step[:, :, None]), step)


def _factor_of_inverse(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper Cholesky factor of the inverse of matrices [matrices, n, n], and 0 for each that has one.

    With all orders reversed, the factor of the matrix itself is the inverse of the one that is sought.
    """
    lower, status = torch.linalg.cholesky_ex(moment.flip(1, 2))
    identity = torch.eye(moment.shape[1]).expand_as(moment)
    return torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True), status


def _best_scale(hessian: Tensor, rest: Tensor, rounded: Tensor) -> Tensor:
    """Return for each row the factor of its rounded values with the least error, [matrices, rows]."""
    product = hessian @ rounded
    scale: Tensor = (rest * product).sum(1) / (rounded * product).sum(1).clamp(min=1e-30)
    return torch.where(rounded.any(1), scale, 0)
