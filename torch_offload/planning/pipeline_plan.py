"""The plan of a pipeline: what each rank of each schedule moves in a step, and which one moves least."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_offload.config import format_size
from torch_offload.planning.step_time import total_by_kind
from torch_offload.reporting.result import Result

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """A step of one rank. Tiers are ``ram`` and ``ssd``.

    Attributes:
        rank: Its number.
        stages: Numbers of those that it holds.
        weights_bytes: Parameters and buffers of these.
        ssd_read: Bytes read from the SSD in a step, by kind of page.
        ssd_written: Bytes written to it.
        budget_bytes: What each tier may hold; of ``ssd`` what is free there.
        needed_bytes: What each tier must hold at least.
        peak_bytes: The most that each tier will hold.
    """

    rank: int
    stages: list[int]
    weights_bytes: int
    ssd_read: dict[str, int]
    ssd_written: dict[str, int]
    budget_bytes: dict[str, int]
    needed_bytes: dict[str, int]
    peak_bytes: dict[str, int]

    @property
    def missing_bytes(self) -> dict[str, int]:
        """What each tier lacks; empty where it fits."""
        lacks = {tier: needed - self.budget_bytes[tier] for tier, needed in self.needed_bytes.items()}
        return {tier: count for tier, count in lacks.items() if count > 0}

    @property
    def moved_bytes(self) -> int:
        """All that is read and written in a step."""
        return sum(self.ssd_read.values()) + sum(self.ssd_written.values())


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule:
    """A step of all ranks by one schedule.

    Attributes:
        name: As torch has it, without ``Schedule``.
        stages: How many there are.
        layers: Of each stage.
        ranks: In their order.
    """

    name: str
    stages: int
    layers: int
    ranks: list[PlannedRank]

    @property
    def fits(self) -> bool:
        """Whether every rank can train with its budgets."""
        return not any(rank.missing_bytes for rank in self.ranks)

    @property
    def moved_bytes(self) -> int:
        """All that the ranks read and write in a step."""
        return sum(rank.moved_bytes for rank in self.ranks)

    @property
    def moved_over_weights(self) -> float:
        """The same, as a multiple of the weights of all stages."""
        return self.moved_bytes / max(1, sum(rank.weights_bytes for rank in self.ranks))

    @property
    def moved_by_kind(self) -> dict[str, int]:
        """The same in bytes, by kind of page."""
        return total_by_kind(moved for rank in self.ranks for moved in (rank.ssd_read, rank.ssd_written))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        ranks = [dataclasses.asdict(rank) | {"moved_bytes": rank.moved_bytes} for rank in self.ranks]
        derived = {"fits": self.fits, "moved_bytes": self.moved_bytes, "moved_over_weights": self.moved_over_weights}
        return dataclasses.asdict(self) | {"ranks": ranks} | derived

    def __str__(self) -> str:
        """Return it in words."""
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.name}, {self.stages} stages of {layers}"


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(Result):
    """Predicted memory and traffic of pipelines by torch's schedules. Times are not predicted.

    Experimental: may change in a minor release.

    Attributes:
        micro_batches: Of a step.
        candidates: All that were replayed, the best first: those that fit, in the order of the bytes that their ranks
            move together.
        refused: Why torch does not run a schedule with these numbers, by its name.
    """

    micro_batches: int
    candidates: list[PlannedSchedule]
    refused: dict[str, str]

    @property
    def best(self) -> PlannedSchedule:
        """What moves least of all that fits; where nothing fits, of all."""
        return self.candidates[0]

    @property
    def fits(self) -> bool:
        """Whether there is one that fits."""
        return self.best.fits

    def why(self) -> Iterator[str]:
        """Yield what decides, in sentences."""
        best = self.best
        if not self.fits:
            yield from _lacks(best)
        if best.moved_bytes == 0:
            yield f"{best}: nothing moves, each rank has memory for all"
            return
        yield f"{best}: {best.moved_over_weights:.3g} times the weights are moved in a step"
        yield from (_compared(other, best) for other in _best_of_each(self.candidates) if other.name != best.name)
        yield from (f"{name}: {reason}" for name, reason in self.refused.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON knows, what follows from it included."""
        return {
            "fits": self.fits,
            "micro_batches": self.micro_batches,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "refused": self.refused,
            "why": list(self.why()),
        }

    def __rich__(self) -> "Table":
        """Return the ranks of the best one, and the others, as a table for rich."""
        return table_of(self)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        return "\n".join(self.why())


def _lacks(schedule: PlannedSchedule) -> Iterator[str]:
    for rank in schedule.ranks:
        for tier, missing_bytes in rank.missing_bytes.items():
            needed_bytes = rank.needed_bytes[tier]
            yield (
                f"does not fit: {tier} of rank {rank.rank} lacks {missing_bytes} bytes; "
                f"give a {tier} of at least {needed_bytes} bytes ({format_size(needed_bytes)})"
            )


def _best_of_each(candidates: Iterable[PlannedSchedule]) -> Iterator[PlannedSchedule]:
    """Yield the first of each name."""
    seen: dict[str, PlannedSchedule] = {}
    for candidate in candidates:
        seen.setdefault(candidate.name, candidate)
    return iter(seen.values())


def _compared(other: PlannedSchedule, best: PlannedSchedule) -> str:
    """Say what one moves more, and of what kind most of that is."""
    own, theirs = best.moved_by_kind, other.moved_by_kind
    more = {kind: count - own.get(kind, 0) for kind, count in theirs.items()}
    kind = max(more, key=lambda name: more[name], default="")
    moved = f"{other}: {other.moved_over_weights:.3g} times the weights"
    if not other.fits:
        return f"{moved}, and it does not fit"
    if not kind or more[kind] <= 0:
        return moved
    return f"{moved}; {kind}s alone {format_size(theirs[kind])} instead of {format_size(own.get(kind, 0))}"


def table_of(plan: PipelinePlan) -> "Table":
    """Return a row for each rank of the best schedule, and one for each of the others."""
    from torch_offload.system.tables import PlainTable

    title = "torch_offload plan: fits" if plan.fits else "torch_offload plan: does not fit"
    headings = ("schedule", "stages", "rank", "SSD read a step", "SSD written a step", "peak of ram")
    table = PlainTable(*headings, title=title, title_style="bold", caption="\n".join(plan.why()))
    for rank in plan.best.ranks:
        table.add_row(plan.best.name, str(plan.best.stages), *_row(str(rank.rank), [rank]))
    table.add_section()
    for other in plan.candidates[1:]:
        table.add_row(other.name, str(other.stages), *_row("all" if other.fits else "do not fit", other.ranks))
    return table


def _row(name: str, ranks: list[PlannedRank]) -> list[str]:
    read, written = (total_by_kind(getattr(rank, way) for rank in ranks) for way in ("ssd_read", "ssd_written"))
    return [name, _sizes(read), _sizes(written), format_size(max(rank.peak_bytes["ram"] for rank in ranks))]


def _sizes(by_kind: dict[str, int]) -> str:
    total = format_size(sum(by_kind.values()))
    parts = ", ".join(f"{kind} {format_size(size)}" for kind, size in sorted(by_kind.items()) if size > 0)
    return f"{total} ({parts})" if parts else total
