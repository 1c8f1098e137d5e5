"""Rounding to ternary with the least error of the output at a given rate.

The error of a matrix is ``trace(E @ H @ E.T)``, where E is what rounding changes and H the second moment of the
inputs. A step and a dead zone are searched for each matrix: on some of its rows by entropy, then on all of them by what
the coder really needs. Further planes round what the first ones leave. Sums run in one order; products of matrices do
in that of torch, which may depend on the count of threads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_offload.compression.rounding import QuantProblem, Rounded, StepAndDeadZone, round_with
from torch_offload.errors import ConfigError
from torch_offload.moe.operators import encode, extents
from torch_offload.moe.ternary import SCALE_DTYPE, TernaryMatrix, check_finite, coded

MAX_BITS_OF_A_PLANE = 1.4
"""Bits per weight above which one plane is worse than two."""

MIN_BITS_OF_A_PLANE = 0.2
"""Bits per weight below which a further plane is not worth its headers."""

_SEARCHED_ROWS = 192
_SEARCH_ROUNDS = 4
_FIT_ROUNDS = 8
_FULL_ENOUGH = 0.99
_HALVINGS_PER_BIT = 1.75
"""Halvings of the error per bit of a weight, about; for comparing pairs whose rates differ a little."""

_DEAD_ZONES = ((0.2, 0.4), (0.4, 0.3), (0.8, 0.2), (1.1, 0.1), (1.4, 0.04))
"""Bits per weight, and the dead zone that was about the best there on trained weights."""

_STEPS = ((0.1, 5.0), (0.4, 3.3), (0.8, 2.3), (1.1, 1.9), (1.4, 1.45))
"""Bits per weight, and the step that has about this rate on trained weights."""

_DEAD_ZONE_FACTORS = (0.6, 1.0, 1.6)

_DEFAULT_SLOPE = 1.5
"""Doublings of the step that save one bit per weight."""

_QMOE_DAMPING = 0.1


@dataclass(frozen=True)
class Rounding:
    """A matrix as terms.

    Attributes:
        terms: The coarsest first.
        coded_bytes: What their coded matrices take; scales and what fills a blob are left out.
        error: The part of the output's energy that is lost.
    """

    terms: list[TernaryMatrix]
    coded_bytes: int
    error: float


def planes_for(bits: float) -> int:
    """Return how many planes a rate takes."""
    return max(1, -int(-bits // MAX_BITS_OF_A_PLANE))


def split(bits: float, planes: int) -> list[float]:
    """Return the bits per weight of each plane: the first ones have as many as are of use to one."""
    shares: list[float] = []
    for later in reversed(range(planes)):
        least_later = later * min(MIN_BITS_OF_A_PLANE, bits / planes)
        share = bits - sum(shares) - least_later
        shares.append(min(share, max(MAX_BITS_OF_A_PLANE, bits / planes)))
    return shares


def quantize(
    weight: Tensor,
    hessian: Tensor | None,
    *,
    bits: float,
    planes: int | None = None,
    damping: float = 0.01,
    sweeps: int = 2,
    coder: str = "smallest",
) -> list[TernaryMatrix]:
    """Round a matrix to terms whose coded matrices, headers and tables included, have at most `bits` per weight.

    Args:
        weight: Floats [rows, columns].
        hessian: Second moment of its inputs, [columns, columns]; None if nothing is known of them.
        bits: Per weight, of all planes together. Scales and what fills a blob are not counted.
        planes: How many terms; None leaves it to the rate.
        damping: Part of the mean of the Hessian's diagonal that is added to it.
        sweeps: How often each value gets another choice.
        coder: One of ``coded_linear.CODERS``.

    Raises:
        UnsupportedModelError: If a weight is not finite.
        ConfigError: If a coded matrix of this shape takes more bits than that.
    """
    shares = split(bits, planes_for(bits) if planes is None else planes)
    limits_bytes = [[int(share * weight.numel() / 8) for share in shares]]
    hessians = None if hessian is None else hessian[None]
    (rounding,) = quantize_all(
        weight[None], hessians, limits_bytes=limits_bytes, damping=damping, sweeps=sweeps, coder=coder
    )
    return rounding.terms


def quantize_all(
    weights: Tensor,
    hessians: Tensor | None,
    *,
    limits_bytes: Sequence[Sequence[int]],
    damping: float = 0.01,
    sweeps: int = 2,
    coder: str = "smallest",
) -> list[Rounding]:
    """Round matrices of one shape.

    Args:
        weights: [matrices, rows, columns].
        hessians: [matrices, columns, columns] or None.
        limits_bytes: For each matrix, for each plane, what its coded matrix may take; as many planes for all.
        damping: See :func:`quantize`.
        sweeps: See :func:`quantize`.
        coder: See :func:`quantize`.

    Raises:
        ConfigError: As :func:`quantize`.
    """
    check_finite(weights)
    problem = QuantProblem.make(weights, hessians, damping=damping)
    energy = problem.energy().clamp(min=1e-30)
    planes = []
    for limits in zip(*limits_bytes, strict=True):
        planes.append(_fit(problem, limits, sweeps=sweeps, coder=coder))
        problem = problem.without([plane.term for plane in planes[-1]])
    errors = (problem.energy() / energy).tolist()
    return [
        Rounding([plane.term for plane in of_one], sum(plane.coded_bytes for plane in of_one), error)
        for of_one, error in zip(zip(*planes, strict=True), errors, strict=True)
    ]


@dataclass(frozen=True)
class CodedTerm:
    """A term and the bytes of its coded matrix."""

    term: TernaryMatrix
    coded_bytes: int

    @classmethod
    def make(cls, term: TernaryMatrix, coder: str) -> "CodedTerm":
        """Code the term and look."""
        return cls(term, extents(coded(term, coder=coder))[0].coded_bytes)


class _StepSearch:
    """Steps at which matrices have the bits that are wanted: the larger a step, the fewer bits."""

    def __init__(self, step: Tensor, wanted: Tensor) -> None:
        self._position = step.log2()
        self._wanted = wanted
        self._last = self._position, torch.full_like(step, torch.inf)
        self._too_fine = torch.full_like(step, -torch.inf)  # the largest that had too many bits
        self._too_coarse = torch.full_like(step, torch.inf)

    @property
    def step(self) -> Tensor:
        return self._position.exp2()

    def move(self, bits: Tensor) -> None:
        """Go on from the bits that the steps had: along the line through the last two, within what is left."""
        position, surplus = self._position, bits - self._wanted
        self._too_fine = torch.where(surplus > 0, self._too_fine.maximum(position), self._too_fine)
        self._too_coarse = torch.where(surplus <= 0, self._too_coarse.minimum(position), self._too_coarse)
        last_position, last_bits = self._last
        slope = (position - last_position) / (last_bits - bits)
        slope = torch.where(slope.isfinite() & (slope > 0), slope, _DEFAULT_SLOPE).clamp(0.5, 6)
        proposed = position + (surplus * slope).clamp(-1.5, 1.5)
        is_inside = (proposed > self._too_fine) & (proposed < self._too_coarse)
        self._last = position, bits
        self._position = torch.where(is_inside, proposed, (self._too_fine + self._too_coarse) / 2)


def _interpolated(table: Sequence[tuple[float, float]], at: Tensor) -> Tensor:
    """Return what a table says between its lines, [..] as `at`."""
    result = torch.full_like(at, table[0][1])
    for (low, first), (high, second) in itertools.pairwise(table):
        share = ((at - low) / (high - low)).clamp(0, 1)
        result = torch.where(at > low, first + share * (second - first), result)
    return result


def search(problem: QuantProblem, bits: Tensor, *, sweeps: int) -> tuple[StepAndDeadZone, Tensor]:
    """Return the step and dead zone of each matrix with the least error at about this entropy, and that error.

    Args:
        problem: The matrices; a few hundred rows of each are enough.
        bits: Entropy per weight, [matrices].
        sweeps: As in :func:`quantize`.
    """
    least = torch.full_like(bits, torch.inf)
    found = StepAndDeadZone(torch.zeros_like(bits), torch.zeros_like(bits))
    energy = problem.energy().clamp(min=1e-30)
    for factor in _DEAD_ZONE_FACTORS:
        dead_zone = _interpolated(_DEAD_ZONES, bits) * factor
        steps = _StepSearch(_interpolated(_STEPS, bits) * (1 + (1 - factor) * 0.2), bits)
        for _ in range(_SEARCH_ROUNDS):
            pair = StepAndDeadZone(steps.step, dead_zone)
            rounded = round_with(problem, pair, sweeps=sweeps)
            entropy = entropy_of(rounded.values)
            error = problem.less(rounded).energy() / energy * (_HALVINGS_PER_BIT * (entropy - bits)).exp2()
            # Where the rate is off, the comparison is a guess: the last rounds, which are near it, decide.
            is_better = (error < least) & ((entropy - bits).abs() < 0.1 * bits)
            least = torch.where(is_better, error, least)
            found = found.replaced(is_better, pair)
            steps.move(entropy)
    never = least.isinf()
    fallback = StepAndDeadZone(_interpolated(_STEPS, bits), _interpolated(_DEAD_ZONES, bits))
    return found.replaced(never, fallback), torch.where(never, 1.0, least)


def curve(problem: QuantProblem) -> tuple[Tensor, Tensor]:
    """Return entropies per weight and errors of matrices at some steps, both [steps, matrices], from coarse to fine.

    Without sweeps: it is for comparing matrices with one another.
    """
    count = len(problem.rest)
    energy = problem.energy().clamp(min=1e-30)
    entropies, errors = [], []
    for (_, step), (_, dead_zone) in zip(_STEPS, _DEAD_ZONES, strict=True):
        pair = StepAndDeadZone(torch.full((count,), step), torch.full((count,), dead_zone))
        rounded = round_with(problem, pair, sweeps=0)
        entropies.append(entropy_of(rounded.values))
        errors.append(problem.less(rounded).energy() / energy)
    return torch.stack(entropies), torch.stack(errors)


def entropy_of(values: Tensor) -> Tensor:
    """Return bits per value of each matrix, [matrices] for [matrices, ., .] of -1, 0 and +1."""
    total = torch.zeros(len(values))
    for value in (-1, 0, 1):
        share = (values == value).float().mean((1, 2))
        total -= torch.where(share > 0, share * share.clamp(min=1e-30).log2(), 0)
    return total


def _fit(problem: QuantProblem, limits_bytes: Sequence[int], *, sweeps: int, coder: str) -> list[CodedTerm]:
    """Round to as many coded bytes as there may be, and no more."""
    count, columns, rows = problem.rest.shape
    per_weight = 8 / (rows * columns)
    bits = torch.tensor([limit_bytes * per_weight for limit_bytes in limits_bytes])
    some_rows = problem.take(torch.arange(count), most_rows=_SEARCHED_ROWS)
    pair, _ = search(some_rows, bits * 0.97, sweeps=sweeps)
    best: dict[int, CodedTerm] = {}
    steps = _StepSearch(pair.step, bits * (1 + _FULL_ENOUGH) / 2)
    waiting = torch.arange(count)
    for _ in range(_FIT_ROUNDS):
        if not len(waiting):
            break
        tried = StepAndDeadZone(steps.step[waiting], pair.dead_zone[waiting])
        rounded = round_with(problem.take(waiting), tried, sweeps=sweeps)
        found = dict(zip(waiting.tolist(), _coded(rounded, coder), strict=True))
        measured = bits.clone()
        for position, term in found.items():
            measured[position] = term.coded_bytes * per_weight
            is_more = position not in best or term.coded_bytes > best[position].coded_bytes
            if term.coded_bytes <= limits_bytes[position] and is_more:
                best[position] = term
        steps.move(measured)
        waiting = torch.tensor([at for at in range(count) if not _is_full(best.get(at), limits_bytes[at])]).long()
    return [best.get(at) or _all_zero(rows, columns, limit_bytes, coder) for at, limit_bytes in enumerate(limits_bytes)]


def _is_full(found: CodedTerm | None, limit_bytes: int) -> bool:
    return found is not None and found.coded_bytes >= _FULL_ENOUGH * limit_bytes


def _coded(rounded: Rounded, coder: str) -> list[CodedTerm]:
    return [CodedTerm.make(rounded.term(position), coder) for position in range(len(rounded.values))]


def _all_zero(rows: int, columns: int, limit_bytes: int, coder: str) -> CodedTerm:
    """Return what takes the fewest bytes of all."""
    values = torch.zeros(rows, columns, dtype=torch.int8)
    scales = torch.zeros(rows, dtype=SCALE_DTYPE), torch.zeros(columns, dtype=SCALE_DTYPE)
    empty = CodedTerm.make(TernaryMatrix(values, *scales), coder)
    if empty.coded_bytes > limit_bytes:
        raise ConfigError(
            f"a coded matrix of {rows} x {columns} takes {empty.coded_bytes} bytes at least, {limit_bytes} are "
            f"allowed; give it at least {empty.coded_bytes * 8 / (rows * columns):.3g} bits per weight and plane"
        )
    return empty


@dataclass(frozen=True)
class QmoeMatrix:
    """QMoE's rounding of a matrix: in each row its smallest value, 0 and its largest.

    The two extremes differ, which one ternary term cannot say, so this is no term. Its rate is that of its own
    dictionary coder, in which QMoE stores two scales per row.

    Attributes:
        values: int8 [rows, columns] of -1, 0 and +1.
        least: What -1 stands for in each row, [rows].
        most: What +1 stands for.
    """

    values: Tensor
    least: Tensor
    most: Tensor

    def dense(self) -> Tensor:
        """The matrix, float32."""
        above = (self.values > 0) * self.most.float()[:, None]
        return above + (self.values < 0) * self.least.float()[:, None]

    @property
    def coded_bytes(self) -> int:
        """Bytes by QMoE's dictionary coder; two scales per row included."""
        return extents(encode(self.values, coder="qmoe"))[0].coded_bytes

    def terms(self) -> list[TernaryMatrix]:
        """The same matrix as ternary terms, but for the rounding of scales to bfloat16."""
        ones = torch.ones(self.values.shape[1], dtype=SCALE_DTYPE)
        half, mean = (self.most - self.least) / 2, (self.most + self.least) / 2
        return [
            TernaryMatrix(self.values, half.to(SCALE_DTYPE), ones),
            TernaryMatrix(self.values.abs(), mean.to(SCALE_DTYPE), ones),
        ]


def qmoe_quantize(weight: Tensor, hessian: Tensor | None, *, damping: float = _QMOE_DAMPING) -> QmoeMatrix:
    """Round a matrix as QMoE does, to be compared with: what is beyond half a row's extreme becomes that extreme.

    Args:
        weight: Floats [rows, columns].
        hessian: Second moment of its inputs, [columns, columns]; None if nothing is known of them.
        damping: Part of the mean of the Hessian's diagonal that is added to it.

    Raises:
        UnsupportedModelError: If a weight is not finite.

    Source: Frantar and Alistarh, "QMoE", arXiv 2310.16795, and its published code.
    """
    check_finite(weight)
    problem = QuantProblem.make(weight[None], None if hessian is None else hessian[None], damping=damping)
    rest, factor = problem.rest[0], problem.factor[0]
    most = rest.amax(0).clamp(min=0).to(SCALE_DTYPE).float()
    least = rest.amin(0).clamp(max=0).to(SCALE_DTYPE).float()
    values = torch.zeros_like(rest)
    for column in range(len(rest)):
        wanted = rest[column]
        value = (wanted > most / 2).float() - (wanted < least / 2).float()
        error = wanted - torch.where(value > 0, most, torch.where(value < 0, least, 0))
        rest[column + 1 :].addr_(factor[column, column + 1 :], error / factor[column, column], alpha=-1)
        values[column] = value
    return QmoeMatrix(values.T.to(torch.int8).contiguous(), least, most)
