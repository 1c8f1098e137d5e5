"""What the engine did, in numbers."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_offload.activations.recompute import ActivationChoice
from torch_offload.config import format_size
from torch_offload.errors import ConfigError
from torch_offload.reporting.bottleneck import Limit, Wear, binding_limit, wear_of
from torch_offload.reporting.timeline import Timeline, Traffic, by_purpose
from torch_offload.system.atomic_files import write_whole

if TYPE_CHECKING:
    from rich.table import Table

    from torch_offload import _C

_TOTALS = ("ssd_read_bytes", "ssd_written_bytes")


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """Figures of a device's memory and its links to the host's, since the engine started.

    Attributes:
        name: Which device.
        budget_bytes: The hard limit of its memory.
        used_bytes: Memory in use now, by purpose, as ``Report.host_bytes``.
        peak_bytes: The most that was ever in use; never above the budget.
        to_device_bytes: Bytes that came from the host's memory, by kind of page.
        to_host_bytes: Bytes that went there.
    """

    name: str
    budget_bytes: int
    used_bytes: dict[str, int]
    peak_bytes: int
    to_device_bytes: dict[str, int]
    to_host_bytes: dict[str, int]

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any]) -> "DeviceReport":
        """Sort what the engine says of its device into a report."""
        rest = dict(statistics)
        memory = rest.pop("memory")
        return cls(
            budget_bytes=memory["limit_bytes"],
            used_bytes=by_purpose(memory),
            peak_bytes=memory["peak_bytes"],
            **rest,
        )


@dataclass(frozen=True, kw_only=True)
class Report(Traffic):
    """Figures since the engine started. Bytes and counts are totals unless they say otherwise.

    Attributes:
        io_engine: How pages are read and written.
        budget_bytes: The hard limit of memory.
        host_bytes: Memory in use now, by purpose: ``pages``, ``free_pages`` (kept for the next page),
            ``temporaries``, ``idle_temporaries`` (kept for reuse), ``small``.
        host_peak_bytes: The most that was ever in use; never above the budget.
        ssd_bytes: Live pages on SSD now.
        ssd_file_bytes: Size of the scratch file now.
        read_bytes: Bytes read from SSD, by kind: ``parameter``, ``gradient``, ``state``, ``activation``, ``other``.
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
        device: The device's figures, None where the module computes in the host's memory. Pins, misses, faults,
            prefetches and evictions are those of the memory in which it computes, stalls those in either.
        activations: Which layers page what backward needs and which compute it again, and why; None where that is not
            decided by the engine.
        timeline: Samples over time, where they were recorded (``Config.report``, the live line).
        activities: What :meth:`trace` writes, where it was recorded (``Config.trace``). Not part of the JSON, nor of
            copies.
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
    counters: dict[str, Any]
    device: DeviceReport | None = None
    activations: ActivationChoice | None = None
    timeline: Timeline | None = None
    activities: "_C.ActivityRecord | None" = field(default=None, compare=False, repr=False)

    @classmethod
    def from_statistics(
        cls,
        statistics: Mapping[str, Any],
        *,
        timeline: Timeline | None = None,
        activations: ActivationChoice | None = None,
        activities: "_C.ActivityRecord | None" = None,
    ) -> "Report":
        """Sort the engine's statistics into a report."""
        rest = dict(statistics)
        memory = rest.pop("memory")
        same = ("read_bytes", "written_bytes", "pins", "misses", "faults", "prefetches", "evictions", "clean_drops")
        known = {name: rest.pop(name) for name in (*same, "stall_seconds")}
        device = rest.pop("device", None)
        return cls(
            io_engine=rest.pop("engine"),
            budget_bytes=memory["limit_bytes"],
            host_bytes=by_purpose(memory),
            host_peak_bytes=memory["peak_bytes"],
            ssd_bytes=rest.pop("stored_bytes"),
            ssd_file_bytes=rest.pop("file_bytes"),
            hit_rate=1.0 if known["pins"] == 0 else 1.0 - known["misses"] / known["pins"],
            counters=rest,
            device=None if device is None else DeviceReport.from_statistics(device),
            activations=activations,
            timeline=timeline,
            activities=activities,
            **known,
        )

    def limit(self) -> Limit | None:
        """Return what binds a step, None where no steps were recorded."""
        steady = None if self.timeline is None else self.timeline.steady()
        return None if steady is None else binding_limit(steady.stall_seconds, steady.seconds)

    def wear(self) -> Wear | None:
        """Return what the run does to the SSD, None where no steps were recorded."""
        steady = None if self.timeline is None else self.timeline.steady()
        if steady is None:
            return None
        return wear_of(steady.ssd_written_bytes, steps=steady.steps, seconds=steady.seconds)

    def json(self) -> str:
        """Return the report as one JSON object, totals of the SSD traffic included."""
        content = dataclasses.asdict(dataclasses.replace(self, activities=None))
        del content["activities"]
        return json.dumps(content | {name: getattr(self, name) for name in _TOTALS})

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write what :meth:`json` returns; ``torch-offload report`` reads it.

        Raises:
            OSError: If the file cannot be written.
        """
        write_whole(path, f"{self.json()}\n".encode())

    @classmethod
    def read_json(cls, path: str | os.PathLike[str]) -> "Report":
        """Read a report that :meth:`write_json` wrote.

        Raises:
            ConfigError: If the file is not such a report.
            OSError: If it cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            timeline = content.pop("timeline", None)
            device = content.pop("device", None)
            activations = content.pop("activations", None)
            known = {name: value for name, value in content.items() if name not in _TOTALS}
            return cls(
                **known,
                device=None if device is None else DeviceReport(**device),
                activations=None if activations is None else ActivationChoice(**activations),
                timeline=None if timeline is None else Timeline.from_dict(timeline),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not a report that this version of torch_offload wrote ({error}); "
                "write one with `torch-offload run --report FILE` or Report.write_json"
            ) from None

    def write_html(self, path: str | os.PathLike[str], *, endurance_bytes: int | None = None) -> None:
        """Write one HTML page that needs nothing else: timelines, what binds, what to change, wear.

        Args:
            path: The file.
            endurance_bytes: What the drive is rated to have written in its life (TBW); the page then says for how
                many days of this training that is.

        Raises:
            OffloadError: If jinja2 or plotly is missing. The message names the extra that brings them.
            OSError: If the file cannot be written.
        """
        from torch_offload.reporting.html_page import page_of

        Path(path).write_text(page_of(self, endurance_bytes=endurance_bytes), encoding="utf-8")

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what each resource did when: a file for https://ui.perfetto.dev or chrome://tracing.

        Lanes: steps, compute and stalls of the program, updates, both directions of the link to a device, reads and
        writes of the SSD. Compressed where the name ends in ``.gz``.

        Raises:
            ConfigError: If it was not recorded.
            OSError: If the file cannot be written.
        """
        from torch_offload.reporting.chrome_trace import write_trace

        if self.activities is None:
            raise ConfigError(
                "there is nothing to trace: it is recorded from the first wrap on, with Config(trace=True) or "
                "`torch-offload run --trace FILE`"
            )
        write_trace(self.activities, path)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot be copied."""
        return {**self.__dict__, "activities": None}

    def __rich__(self) -> "Table":
        """Return the report as a table for rich."""
        from torch_offload.reporting.table import table_of

        return table_of(self)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        stalls = ", ".join(f"{cause} {seconds:.3g}" for cause, seconds in self.stall_seconds.items())
        return "\n".join(
            (
                *(() if self.device is None else (_device_line(self.device),)),
                f"memory  {format_size(sum(self.host_bytes.values()))} in use, "
                f"peak {format_size(self.host_peak_bytes)} of {format_size(self.budget_bytes)}",
                f"ssd     {format_size(self.ssd_bytes)} stored; read {format_size(self.ssd_read_bytes)}, "
                f"written {format_size(self.ssd_written_bytes)} ({self.io_engine})",
                f"pages   {self.pins} pins, {self.hit_rate:.1%} without a read; {self.prefetches} prefetched, "
                f"{self.evictions} evicted ({self.clean_drops} clean), {self.faults} faults",
                f"stalls  {stalls or 'none'} (seconds)",
                *(() if self.activations is None else (f"layers  {self.activations.explanation}",)),
            )
        )


def _device_line(device: DeviceReport) -> str:
    return (
        f"device  {format_size(sum(device.used_bytes.values()))} in use, peak {format_size(device.peak_bytes)} of "
        f"{format_size(device.budget_bytes)}; from the host {format_size(sum(device.to_device_bytes.values()))}, "
        f"to it {format_size(sum(device.to_host_bytes.values()))} ({device.name})"
    )
