"""The bottleneck of a step, one suggestion against it, and the wear of the SSD."""

from collections.abc import Mapping
from dataclasses import dataclass

COMPUTE_BOUND_STALL_SHARE = 0.10  # with fewer stalls a step is compute-bound

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
        "evictions that make memory free",
        "give more memory (--ram), a directory on a disk that writes faster (--ssd), or a smaller batch, whose "
        "activations take less of the budget",
    ),
    "update": (
        "deferred updates of the optimizer",
        "give the step more tokens, so that there is time to update beside the computation, or leave it a free core",
    ),
    "fault": (
        "page faults of code behind the dispatcher (numpy, compiled kernels)",
        "move such access out of the step, or give more memory (--ram)",
    ),
    "network": (
        "waiting for other ranks",
        "compare the reports of all ranks: the one that waits least for the others is what they wait for",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The resource that a step waits for most.

    Attributes:
        name: ``compute``, or the cause of most stalls.
        share: Part of the time that it takes.
        description: The same in words.
        suggestion: One thing to change.
    """

    name: str
    share: float
    description: str
    suggestion: str


def bottleneck_of(stall_seconds: Mapping[str, float], seconds: float) -> Bottleneck | None:
    """Return the bottleneck in a span of time, None for an empty span.

    Args:
        stall_seconds: By cause.
        seconds: Length of the span.
    """
    if seconds <= 0:
        return None
    stalled = min(1.0, sum(stall_seconds.values()) / seconds)
    if stalled < COMPUTE_BOUND_STALL_SHARE:
        return Bottleneck(
            name="compute",
            share=1.0 - stalled,
            description="the computation itself",
            suggestion="use a faster processor or fewer tokens per step; paging costs little, a smaller budget may do",
        )
    name = max(stall_seconds, key=lambda cause: stall_seconds[cause])
    description, suggestion = _CAUSES.get(name, (f"stalls of the kind {name!r}", "give more memory (--ram)"))
    share = min(1.0, stall_seconds[name] / seconds)
    return Bottleneck(name=name, share=share, description=description, suggestion=suggestion)


@dataclass(frozen=True, kw_only=True)
class Wear:
    """Bytes that this process writes to the SSD; the drive may write more inside."""

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
