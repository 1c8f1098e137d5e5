"""The engine's figures at moments of a run, and what lies between two moments."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

PURPOSES = {
    "pages": "frame_bytes",
    "free_pages": "free_frame_bytes",
    "temporaries": "range_bytes",
    "idle_temporaries": "idle_range_bytes",
    "small": "small_bytes",
}
"""Purposes of memory, and what the engine calls their bytes."""


def by_purpose(memory: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes in use out of what the engine says of a memory."""
    return {purpose: memory[name] for purpose, name in PURPOSES.items()}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Totals since the engine started, at one moment.

    Attributes:
        seconds: Since recording began.
        steps: Optimizer steps that have ended.
        tokens: Tokens that went into the model while training, 0 where they are not counted.
        is_step_end: Whether an optimizer step ended at this moment.
        read_bytes: By kind of page.
        written_bytes: By kind of page.
        stall_seconds: By cause.
        host_bytes: Memory in use at this moment, by purpose.
        stored_bytes: Live pages on SSD at this moment.
        device_bytes: A device's memory in use at this moment, by purpose; empty where there is none, as the next two.
        to_device_bytes: Bytes that came to the device from the host's memory, by kind of page.
        to_host_bytes: Bytes that went there, by kind of page.
    """

    seconds: float
    steps: int
    tokens: int
    is_step_end: bool
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    stall_seconds: dict[str, float]
    host_bytes: dict[str, int]
    stored_bytes: int
    device_bytes: dict[str, int] = field(default_factory=dict)
    to_device_bytes: dict[str, int] = field(default_factory=dict)
    to_host_bytes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_statistics(
        cls, statistics: Mapping[str, Any], *, seconds: float, steps: int, tokens: int, is_step_end: bool
    ) -> "Sample":
        """Pick what changes over time out of the engine's statistics."""
        memory = statistics["memory"]
        device = statistics.get("device")
        link = {} if device is None else {name: dict(device[name]) for name in ("to_device_bytes", "to_host_bytes")}
        return cls(
            seconds=seconds,
            steps=steps,
            tokens=tokens,
            is_step_end=is_step_end,
            read_bytes=dict(statistics["read_bytes"]),
            written_bytes=dict(statistics["written_bytes"]),
            stall_seconds=dict(statistics["stall_seconds"]),
            host_bytes=by_purpose(memory),
            stored_bytes=statistics["stored_bytes"],
            device_bytes={} if device is None else by_purpose(device["memory"]),
            **link,
        )


class Traffic:
    """Sums over the kinds of pages, for what counts SSD traffic by kind."""

    read_bytes: dict[str, int]
    written_bytes: dict[str, int]

    @property
    def ssd_read_bytes(self) -> int:
        """Bytes read from SSD, all kinds together."""
        return sum(self.read_bytes.values())

    @property
    def ssd_written_bytes(self) -> int:
        """Bytes written to SSD, all kinds together."""
        return sum(self.written_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Interval(Traffic):
    """An interval between two moments and its figures."""

    start_seconds: float
    seconds: float
    steps: int
    tokens: int
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    stall_seconds: dict[str, float]
    to_device_bytes: int = 0
    to_host_bytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """The time without stalls; 0 where threads stalled side by side for longer than that."""
        return max(0.0, self.seconds - sum(self.stall_seconds.values()))

    @property
    def stall_share(self) -> float:
        """Share of the time in which the program waited, at most 1."""
        return min(1.0, sum(self.stall_seconds.values()) / self.seconds) if self.seconds > 0 else 0.0


def between(earlier: Sample, later: Sample) -> Interval:
    """Return what happened from one moment to another."""
    return Interval(
        start_seconds=earlier.seconds,
        seconds=later.seconds - earlier.seconds,
        steps=later.steps - earlier.steps,
        tokens=later.tokens - earlier.tokens,
        read_bytes=_difference(later.read_bytes, earlier.read_bytes),
        written_bytes=_difference(later.written_bytes, earlier.written_bytes),
        stall_seconds=_difference(later.stall_seconds, earlier.stall_seconds),
        to_device_bytes=sum(_difference(later.to_device_bytes, earlier.to_device_bytes).values()),
        to_host_bytes=sum(_difference(later.to_host_bytes, earlier.to_host_bytes).values()),
    )


def _difference(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value - earlier.get(name, 0) for name, value in later.items()}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A run in samples.

    Attributes:
        recent: The last samples, closely spaced, step ends among them.
        step_ends: Ends of steps over the whole run; of a long run every second, fourth, ... only.
    """

    recent: list[Sample] = field(default_factory=list)
    step_ends: list[Sample] = field(default_factory=list)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Timeline":
        """Undo ``to_dict``.

        Raises:
            TypeError: If something is missing or unknown.
            KeyError: If something is missing.
        """
        return cls(
            recent=[Sample(**sample) for sample in content["recent"]],
            step_ends=[Sample(**sample) for sample in content["step_ends"]],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON knows."""
        return asdict(self)

    def steps(self) -> list[Interval]:
        """Return what lies between one recorded end of a step and the next; of a long run several steps at a time."""
        return intervals(self.step_ends)

    def steady(self) -> Interval | None:
        """Return all steps together without the first ones, which bring everything to its place.

        None if no two steps have ended, or no time has passed between them. The first tenth is left out, at least one
        step where three or more are there.
        """
        ends = self.step_ends
        if len(ends) < 2:
            return None
        skipped = max(len(ends) // 10, 1 if len(ends) > 2 else 0)
        found = between(ends[skipped], ends[-1])
        return found if found.steps > 0 and found.seconds > 0 else None

    def last_steps(self, *, min_intervals: int = 24) -> list[Sample]:
        """Return recent samples from the end of a step to the end of the last: as few steps as show something."""
        ends = [index for index, sample in enumerate(self.recent) if sample.is_step_end]
        if len(ends) < 2:
            return []
        last = ends[-1]
        start = next((index for index in reversed(ends[:-1]) if last - index >= min_intervals), ends[0])
        return self.recent[start : last + 1]


def intervals(samples: Sequence[Sample]) -> list[Interval]:
    """Return what lies between each sample and the next."""
    return [between(earlier, later) for earlier, later in pairwise(samples) if later.seconds > earlier.seconds]
