"""Where the time of a GPU's step goes: what its kernels and its link are busy with, and the threads that feed them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMPUTE, TO_DEVICE, TO_HOST = "compute", "to device", "to host"
KINDS = (COMPUTE, TO_DEVICE, TO_HOST)
SLICE_SECONDS = 0.1


@dataclass(frozen=True)
class Span:
    """Something that the GPU did, in seconds on the profiler's clock."""

    name: str
    begin: float
    end: float

    @property
    def kind(self) -> str:
        """Return what of the GPU was busy."""
        if "HtoD" in self.name:
            return TO_DEVICE
        return TO_HOST if "DtoH" in self.name else COMPUTE


def spans_of(profile: torch.profiler.profile) -> list[Span]:
    """Return what a profile of CUDA activities has."""
    return [
        Span(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def busy_seconds(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return for how long at least one of them went on between two moments."""
    busy, until = 0.0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        first, last = max(span.begin, until), min(span.end, end)
        if last > first:
            busy += last - first
            until = last
    return busy


def extent_of(spans: list[Span]) -> tuple[float, float]:
    """Return when the first of them began and the last one ended."""
    return min(span.begin for span in spans), max(span.end for span in spans)


def timeline(spans: list[Span], slice_seconds: float = SLICE_SECONDS) -> list[dict[str, float]]:
    """Return the busy share of each kind, slice by slice from the first span to the last."""
    begin, end = extent_of(spans)
    of_kind = {kind: [span for span in spans if span.kind == kind] for kind in KINDS}
    count = math.ceil((end - begin) / slice_seconds)
    edges = [(begin + i * slice_seconds, begin + (i + 1) * slice_seconds) for i in range(count)]
    return [
        {kind: busy_seconds(some, first, last) / slice_seconds for kind, some in of_kind.items()}
        for first, last in edges
    ]


def longest(spans: Iterable[Span], most: int = 12) -> list[dict[str, Any]]:
    """Return the kernels that take most time together, with how often they ran."""
    totals: dict[str, list[float]] = {}
    for span in spans:
        total = totals.setdefault(span.name, [0.0, 0])
        total[0] += span.end - span.begin
        total[1] += 1
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])
    return [{"name": name, "seconds": seconds, "count": count} for name, (seconds, count) in ordered[:most]]


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds that threads of this process have taken, by their names."""
    ticks_per_second = 100  # of the files' clock, on every Linux
    taken: dict[str, float] = {}
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        taken[name] = taken.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks_per_second
    return taken
