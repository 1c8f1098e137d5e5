"""Rate allocation: the sectors of 4 KiB of each matrix of a layer, one after the other where it saves most energy."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_offload.compression.gptq import MAX_BITS_OF_A_PLANE, MIN_BITS_OF_A_PLANE
from torch_offload.config import SECTOR_BYTES
from torch_offload.errors import ConfigError

FILL_BYTES = 128
"""Minimum of an extent behind its coded bytes."""

_OF_ENTROPY = 0.97
"""The part of the coded bits that is entropy."""


@dataclass(frozen=True)
class SectorLimits:
    """Sectors of one plane of a matrix: fewer are of no use; rather than more, another plane gets them."""

    least: int
    most: int

    @classmethod
    def of(cls, weights: int) -> "SectorLimits":
        """Limits of a matrix with so many weights."""
        least, most = (bits * weights / 8 + FILL_BYTES for bits in (MIN_BITS_OF_A_PLANE, 1.03 * MAX_BITS_OF_A_PLANE))
        return cls(max(1, int(least // SECTOR_BYTES)), -int(-most // SECTOR_BYTES))

    def split(self, sectors: int, planes: int) -> list[int]:
        """Return the sectors of each plane: the first ones have as many as are of use to one."""
        shares: list[int] = []
        for later in reversed(range(planes)):
            shares.append(min(sectors - sum(shares) - later * self.least, self.most))
        return shares


def bytes_in(sectors: int) -> int:
    """Return the coded bytes that fit."""
    return sectors * SECTOR_BYTES - FILL_BYTES


@dataclass(frozen=True)
class RateCurve:
    """Loss of a matrix at some rates, and its weight among the others.

    Attributes:
        points: Bits of entropy per weight, ascending, and the logarithm of the part of the output's energy lost.
        energy: What a whole matrix is worth.
        weights: Of the matrix.
    """

    points: tuple[tuple[float, float], ...]
    energy: float
    weights: int

    @classmethod
    def make(cls, bits: Sequence[float], errors: Sequence[float], *, energy: float, weights: int) -> "RateCurve":
        """Take points in any order. Nothing is known of a matrix without bits: all of it is lost."""
        measured = sorted((rate, math.log(max(error, 1e-9))) for rate, error in zip(bits, errors, strict=True))
        return cls(((0.0, 0.0), *(point for point in measured if point[0] > 0)), energy, weights)

    def lost(self, sectors: Sequence[int]) -> float:
        """Return the energy lost with so many sectors in each plane; each takes from the rest what the first would."""
        rates = (_OF_ENTROPY * 8 * bytes_in(count) / self.weights for count in sectors)
        return self.energy * math.exp(sum(self._log_error(rate) for rate in rates))

    def _log_error(self, bits: float) -> float:
        """Interpolate; beyond the last point it goes on as before."""
        if len(self.points) == 1:
            return 0.0
        following = next((at for at, (rate, _) in enumerate(self.points) if rate >= bits and at), len(self.points) - 1)
        (low, first), (high, second) = self.points[following - 1 : following + 1]
        return first + (bits - low) / max(high - low, 1e-6) * (second - first)


def min_sectors(weights: Sequence[int], planes: int) -> int:
    """Return how many sectors matrices of so many weights need at least."""
    return planes * sum(SectorLimits.of(count).least for count in weights)


def share_sectors(curves: Sequence[RateCurve], *, sectors: int, planes: int) -> list[list[int]]:
    """Give sectors to matrices, one after the other to the one that gains the most by it.

    Args:
        curves: Of each matrix.
        sectors: In all; enough for the least of each.
        planes: Of each matrix.

    Returns:
        The sectors of each plane of each matrix.

    Raises:
        ConfigError: If there are fewer sectors than the least of each.
    """
    limits = [SectorLimits.of(curve.weights) for curve in curves]
    given = [planes * limit.least for limit in limits]
    if sectors < sum(given):
        raise ConfigError(
            f"{sectors} sectors for {len(curves)} matrices in {planes} planes, {sum(given)} is the least; give more "
            "bits per weight"
        )
    waiting: list[tuple[float, int]] = []

    def offer(position: int) -> None:
        curve, limit, now = curves[position], limits[position], given[position]
        if now < planes * limit.most:
            gain = curve.lost(limit.split(now, planes)) - curve.lost(limit.split(now + 1, planes))
            heapq.heappush(waiting, (-gain, position))

    for position in range(len(curves)):
        offer(position)
    for _ in range(sectors - sum(given)):
        if not waiting:
            break
        _, position = heapq.heappop(waiting)
        given[position] += 1
        offer(position)
    return [limit.split(count, planes) for limit, count in zip(limits, given, strict=True)]
