"""The report of an engine: its figures, and the ways to show and keep them."""

import dataclasses
import os
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from torch_offload.activations.recompute import ActivationChoice
from torch_offload.config import format_size
from torch_offload.errors import ConfigError
from torch_offload.reporting.chrome_trace import write_trace
from torch_offload.reporting.figures import DeviceReport, Figures, ShareReport
from torch_offload.reporting.html_page import page_of
from torch_offload.reporting.prediction import Comparison, Prediction
from torch_offload.reporting.read_times import ReadTimes
from torch_offload.reporting.result import Result
from torch_offload.reporting.saved_format import SavedReport, fields_of
from torch_offload.reporting.table import share_text, table_of
from torch_offload.reporting.timeline import Timeline, by_purpose
from torch_offload.system.atomic_files import write_whole
from torch_offload.system.environment import Rank

if TYPE_CHECKING:
    from rich.table import Table

    from torch_offload import _C

MAX_REPORT_BYTES = 64 << 20
"""Of a file that is read. A long run's has some 5 MiB."""
MAX_NAME_SHOWN = 100
_TOTALS = ("ssd_read_bytes", "ssd_written_bytes")


@dataclass(frozen=True, kw_only=True)
class Report(Figures, Result):
    """The engine's figures since its start; see :class:`Figures` for the fields."""

    @classmethod
    def from_statistics(
        cls,
        statistics: Mapping[str, Any],
        *,
        timeline: Timeline | None = None,
        activations: ActivationChoice | None = None,
        prediction: Prediction | None = None,
        rank: Rank | None = None,
        activities: "_C.ActivityRecord | None" = None,
    ) -> "Report":
        """Sort the engine's statistics into a report."""
        rest = dict(statistics)
        memory = rest.pop("memory")
        same = ("read_bytes", "written_bytes", "pins", "misses", "faults", "prefetches", "evictions", "clean_drops")
        known = {name: rest.pop(name) for name in (*same, "stall_seconds")}
        device, share = rest.pop("device", None), rest.pop("share", None)
        return cls(
            io_engine=rest.pop("engine"),
            budget_bytes=memory["most_limit_bytes"],
            host_bytes=by_purpose(memory),
            host_peak_bytes=memory["peak_bytes"],
            ssd_bytes=rest.pop("stored_bytes"),
            ssd_file_bytes=rest.pop("file_bytes"),
            read_times=ReadTimes(tuple(rest.pop("read_times"))),
            hit_rate=1.0 if known["pins"] == 0 else 1.0 - known["misses"] / known["pins"],
            counters=rest,
            share=None if share is None else ShareReport(**share),
            device=None if device is None else DeviceReport.from_statistics(device),
            activations=activations,
            timeline=timeline,
            prediction=prediction,
            rank=rank,
            activities=activities,
            **known,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON knows, totals of the SSD traffic and quantiles included."""
        content = dataclasses.asdict(dataclasses.replace(self, activities=None))
        del content["activities"]
        content["prediction"] = None if self.prediction is None else self.prediction.model_dump()
        content["rank"] = None if self.rank is None else self.rank.model_dump()
        made = {
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "read_seconds": self.read_times.quantiles(),
        }
        return content | {name: getattr(self, name) for name in _TOTALS} | made

    @classmethod
    def read_json(cls, path: str | os.PathLike[str]) -> "Report":
        """Read a report that :meth:`write_json` wrote.

        Raises:
            ConfigError: If the file is not such a report.
            OSError: If it cannot be read.
        """
        text = _text_of(Path(path))
        try:
            saved = SavedReport.model_validate_json(text)
        except ValidationError as error:
            raise _not_a_report(path, _first_problem(error)) from None
        share, device, activations, timeline = saved.share, saved.device, saved.activations, saved.timeline
        return cls(
            **fields_of(saved)
            | {
                "read_times": ReadTimes(**fields_of(saved.read_times)),
                "share": None if share is None else ShareReport(**fields_of(share)),
                "device": None if device is None else DeviceReport(**fields_of(device)),
                "activations": None if activations is None else ActivationChoice(**fields_of(activations)),
                "timeline": None if timeline is None else Timeline.from_dict(timeline.model_dump()),
            }
        )

    def write_html(self, path: str | os.PathLike[str], *, endurance_bytes: int | None = None) -> None:
        """Write one HTML page that needs nothing else: timelines, the bottleneck, a suggestion, wear.

        Args:
            path: The file.
            endurance_bytes: What the drive is rated to have written in its life (TBW); the page then says for how
                many days of this training that is.

        Raises:
            OffloadError: If jinja2 or plotly is missing. The message names the extra that brings them.
            OSError: If the file cannot be written.
        """
        write_whole(path, page_of(self, endurance_bytes=endurance_bytes).encode())

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what each resource did when: a file for https://ui.perfetto.dev or chrome://tracing.

        Lanes: steps, compute and stalls of the program, updates, both directions of the link to a device, reads and
        writes of the SSD. Compressed where the name ends in ``.gz``.

        Raises:
            ConfigError: If it was not recorded.
            OSError: If the file cannot be written.
        """
        if self.activities is None:
            raise ConfigError(
                "no activities were recorded; record them with Config(trace=True) or `torch-offload run --trace FILE`"
            )
        write_trace(self.activities, path)

    def __rich__(self) -> "Table":
        """Return the report as a table for rich."""
        return table_of(self)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        stalls = ", ".join(f"{cause} {seconds:.3g}" for cause, seconds in self.stall_seconds.items())
        return "\n".join(
            (
                *(() if self.device is None else (_device_line(self.device),)),
                f"memory  {format_size(sum(self.host_bytes.values()))} in use, "
                f"peak {format_size(self.host_peak_bytes)} of {format_size(self.budget_bytes)}",
                *(() if self.share is None else (f"shared  {share_text(self.share)}",)),
                f"ssd     {format_size(self.ssd_bytes)} stored; read {format_size(self.ssd_read_bytes)}, "
                f"written {format_size(self.ssd_written_bytes)} ({self.io_engine})",
                f"reads   {self.read_times}",
                f"pages   {self.pins} pins, {self.hit_rate:.1%} without a read; {self.prefetches} prefetched, "
                f"{self.evictions} evicted ({self.clean_drops} clean), {self.faults} faults",
                f"stalls  {stalls or 'none'} (seconds)",
                *(() if self.activations is None else (f"layers  {self.activations.explanation}",)),
                *plan_lines(self.comparison),
            )
        )


def plan_lines(comparison: Comparison | None) -> list[str]:
    """Return a line for each figure, and one for the input that was wrong."""
    if comparison is None:
        return []
    lines = [f"plan    {figure.name}: {figure}" for figure in comparison.figures]
    return lines if comparison.wrong_input is None else [*lines, f"plan    wrong: {comparison.wrong_input}"]


def _text_of(path: Path) -> bytes:
    """Return the JSON of a report.

    Raises:
        ConfigError: If it is longer than any report, or no regular file.
        OSError: If it cannot be read.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _not_a_report(path, "no regular file")
        text: bytes = file.read(MAX_REPORT_BYTES + 1)
    if len(text) > MAX_REPORT_BYTES:
        raise _not_a_report(path, f"more than {format_size(MAX_REPORT_BYTES)}")
    return text


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _not_a_report(path: str | os.PathLike[str], problem: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a report that this version of torch_offload wrote ({problem}); "
        "write one with `torch-offload run --report FILE` or Report.write_json"
    )


def _first_problem(error: ValidationError) -> str:
    """Say in one sentence what is wrong, where, and what is there."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    if not place:
        return f"{first['msg']}{more}"
    return f"{place[:MAX_NAME_SHOWN]}: {first['msg']}, got {reprlib.repr(first['input'])}{more}"


def _device_line(device: DeviceReport) -> str:
    updates = "" if device.updates_on is None else f", updates on the {device.updates_on.upper()}"
    return (
        f"device  {format_size(sum(device.used_bytes.values()))} in use, peak {format_size(device.peak_bytes)} of "
        f"{format_size(device.budget_bytes)}; from the host {format_size(sum(device.to_device_bytes.values()))}, "
        f"to it {format_size(sum(device.to_host_bytes.values()))} ({device.name}{updates})"
    )
