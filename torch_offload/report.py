"""What the engine did, in numbers."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_offload.config import format_size

_PURPOSES = {
    "pages": "frame_bytes",
    "free_pages": "free_frame_bytes",
    "temporaries": "range_bytes",
    "idle_temporaries": "idle_range_bytes",
    "small": "small_bytes",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures since the engine started. Bytes and counts are totals unless they say otherwise.

    Attributes:
        io_engine: How pages are read and written.
        budget_bytes: The hard limit of memory.
        host_bytes: Memory in use now, by purpose: ``pages``, ``free_pages`` (kept for the next page),
            ``temporaries``, ``idle_temporaries`` (kept for reuse), ``small``.
        host_peak_bytes: The most that was ever in use; never above the budget.
        ssd_bytes: Live pages on SSD now.
        ssd_file_bytes: Size of the scratch file now.
        read_bytes: Bytes read from SSD, by kind: ``parameter``, ``gradient``, ``state``, ``other``.
        written_bytes: Bytes written to SSD, by kind.
        pins: Times a page was needed.
        misses: Of those, times it had to be read first.
        hit_rate: Share of pins without a miss, 1 where there were none.
        faults: Accesses behind the dispatcher to absent pages.
        prefetches: Pages read ahead of use.
        evictions: Pages that left memory.
        clean_drops: Of those, pages that left without a write.
        stall_seconds: Seconds in which the program waited, by cause: ``read``, ``memory``, ``update``, ``fault``.
        counters: Everything else that the engine counts, by name: deferred work, norms, adoptions.
    """

    io_engine: str
    budget_bytes: int
    host_bytes: dict[str, int]
    host_peak_bytes: int
    ssd_bytes: int
    ssd_file_bytes: int
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    pins: int
    misses: int
    hit_rate: float
    faults: int
    prefetches: int
    evictions: int
    clean_drops: int
    stall_seconds: dict[str, float]
    counters: dict[str, int]

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any]) -> "Report":
        """Sort the engine's statistics into a report."""
        rest = dict(statistics)
        memory = rest.pop("memory")
        same = ("read_bytes", "written_bytes", "pins", "misses", "faults", "prefetches", "evictions", "clean_drops")
        known = {name: rest.pop(name) for name in (*same, "stall_seconds")}
        return cls(
            io_engine=rest.pop("engine"),
            budget_bytes=memory["limit_bytes"],
            host_bytes={purpose: memory[name] for purpose, name in _PURPOSES.items()},
            host_peak_bytes=memory["peak_bytes"],
            ssd_bytes=rest.pop("stored_bytes"),
            ssd_file_bytes=rest.pop("file_bytes"),
            hit_rate=1.0 if known["pins"] == 0 else 1.0 - known["misses"] / known["pins"],
            counters=rest,
            **known,
        )

    @property
    def ssd_read_bytes(self) -> int:
        """Bytes read from SSD, all kinds together."""
        return sum(self.read_bytes.values())

    @property
    def ssd_written_bytes(self) -> int:
        """Bytes written to SSD, all kinds together."""
        return sum(self.written_bytes.values())

    def json(self) -> str:
        """Return the report as one JSON object, totals of the SSD traffic included."""
        totals = {"ssd_read_bytes": self.ssd_read_bytes, "ssd_written_bytes": self.ssd_written_bytes}
        return json.dumps(dataclasses.asdict(self) | totals)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        stalls = ", ".join(f"{cause} {seconds:.3g}" for cause, seconds in self.stall_seconds.items())
        return "\n".join(
            (
                f"memory  {format_size(sum(self.host_bytes.values()))} in use, "
                f"peak {format_size(self.host_peak_bytes)} of {format_size(self.budget_bytes)}",
                f"ssd     {format_size(self.ssd_bytes)} stored; read {format_size(self.ssd_read_bytes)}, "
                f"written {format_size(self.ssd_written_bytes)} ({self.io_engine})",
                f"pages   {self.pins} pins, {self.hit_rate:.1%} without a read; {self.prefetches} prefetched, "
                f"{self.evictions} evicted ({self.clean_drops} clean), {self.faults} faults",
                f"stalls  {stalls or 'none'} (seconds)",
            )
        )
