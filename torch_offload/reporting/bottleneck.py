"""Which resource a step waits for, and what to change about it."""

from collections.abc import Mapping
from dataclasses import dataclass

COMPUTE_BINDS_BELOW = 0.10  # share of stalls

_CAUSES = {
    "read": (
        "reading from the SSD",
        "give more memory (--ram), a faster directory (--ssd), or more tokens per step, so that the same bytes are "
        "read for more work",
    ),
    "write": (
        "writing to the SSD",
        "give more memory (--ram), a directory on a disk that writes faster (--ssd), or more tokens per step",
    ),
    "memory": (
        "pages that have to leave memory",
        "give more memory (--ram), a directory on a disk that writes faster (--ssd), or a smaller batch, whose "
        "activations take less of the budget",
    ),
    "update": (
        "updates of the optimizer that were put off",
        "give the step more tokens, so that there is time to update beside the computation, or leave it a free core",
    ),
    "fault": (
        "accesses that pass by torch (numpy, compiled kernels)",
        "move such access out of the step, or give more memory (--ram)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What binds.

    Attributes:
        name: ``compute``, or the cause of most stalls.
        share: Part of the time that it takes.
        what: The same in words.
        remedy: What to change.
    """

    name: str
    share: float
    what: str
    remedy: str


def binding_limit(stall_seconds: Mapping[str, float], seconds: float) -> Limit | None:
    """Return what binds in a span of time, None where there is none."""
    if seconds <= 0:
        return None
    stalled = min(1.0, sum(stall_seconds.values()) / seconds)
    if stalled < COMPUTE_BINDS_BELOW:
        return Limit(
            name="compute",
            share=1.0 - stalled,
            what="the computation itself",
            remedy="a faster processor or fewer tokens per step; paging costs little, so that a smaller budget may do",
        )
    name = max(stall_seconds, key=lambda cause: stall_seconds[cause])
    what, remedy = _CAUSES.get(name, (f"what is counted as {name!r}", "give more memory (--ram)"))
    return Limit(name=name, share=min(1.0, stall_seconds[name] / seconds), what=what, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Wear:
    """What a run does to the SSD, as bytes that this process writes; the drive may write more inside."""

    bytes_per_step: float
    bytes_per_day: float

    def days(self, endurance_bytes: int) -> float | None:
        """Return for how many days of such training a drive is rated, None where nothing is written."""
        return endurance_bytes / self.bytes_per_day if self.bytes_per_day > 0 else None


def wear_of(written_bytes: int, *, steps: int, seconds: float) -> Wear | None:
    """Return the wear of a span of time, None where there is none."""
    if steps <= 0 or seconds <= 0:
        return None
    return Wear(bytes_per_step=written_bytes / steps, bytes_per_day=written_bytes / seconds * 86400)
