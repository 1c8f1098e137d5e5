"""One line at the foot of the terminal: speed, traffic, stalls and memory while a script trains.

The last row is taken out of the part of the terminal that scrolls, as package managers do for their progress bar. So
everything else that writes there (progress bars, logs, prints) goes on above it, none the wiser, and never mixes with
it. Where stderr is not such a terminal, not one byte is written.
"""

import io
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch.distributed

from torch_offload.reporting.recorder import Recorder
from torch_offload.reporting.timeline import Interval, Sample, between
from torch_offload.system.terminal import one_line
from torch_offload.system.threads import BackgroundThread

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.5
SPEED_STEPS = 10
SPEED_SECONDS = 30.0
TRAFFIC_SECONDS = 2.0
MIN_ROWS = 4
LABEL = " offload "
SEPARATOR = " │ "


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The figures of the line: a recorder's last samples beside the budgets."""

    recorder: Recorder
    budget_bytes: int
    device_budget_bytes: int


class StatusLine:
    """Paints the line twice a second.

    Threads: its own paints; :meth:`start` and :meth:`stop` are for one thread.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write nothing before :meth:`start`, and before there is a recorder to :meth:`watch`.

        Args:
            stream: A terminal.
        """
        self._watched: Watched | None = None
        self._row = BottomRow(stream)
        self._ended = threading.Event()
        self._process = os.getpid()
        self._thread: BackgroundThread | None = None

    def watch(self, watched: "Watched | None") -> None:
        """Show the figures of a recorder from the next time on; None clears the line."""
        self._watched = watched

    def start(self) -> None:
        """Paint from now on."""
        self._thread = BackgroundThread(self._run)
        if not self._thread.start():
            logger.warning("there is no room for another thread: no status line is shown")

    def stop(self) -> None:
        """Paint no more and give the terminal back. Safe to call twice; nothing in a forked child."""
        if self._process != os.getpid():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._row.give_back()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            try:
                self.tick()
            except (OSError, ValueError):
                return  # the terminal is gone

    def tick(self) -> None:
        """Paint the figures of this moment; give the row back where there is nothing to show (any more)."""
        watched = self._watched
        if watched is None or not _speaks_for_all():
            self._row.give_back()
            return
        samples = watched.recorder.timeline().recent
        self._row.paint(
            parts_of(samples, budget_bytes=watched.budget_bytes, device_budget_bytes=watched.device_budget_bytes)
        )


class BottomRow:
    """The last row of a terminal, kept out of what scrolls.

    Source: the escape sequences are those of DECSTBM, DECSC and DECRC (VT100); the order is that of apt's progress bar.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size: os.terminal_size | None = None

    def paint(self, parts: Sequence[str]) -> None:
        """Show as many of the parts as fit, the first ones first, in one write.

        Raises:
            OSError: If the terminal is gone.
        """
        size = os.get_terminal_size(self._stream.fileno())
        if size.lines < MIN_ROWS:
            return
        set_up = "" if size == self._size else _keep_last_row_free(size.lines)
        self._size = size
        self._write(f"{set_up}\x1b7\x1b[{size.lines};1H\x1b[2K{rendered(parts, width=size.columns - 1)}\x1b8")

    def give_back(self) -> None:
        """Clear the row and let the whole terminal scroll again. Safe to call twice."""
        if self._size is None:
            return
        lines, self._size = self._size.lines, None
        try:
            self._write(f"\x1b7\x1b[{lines};1H\x1b[2K\x1b[r\x1b8")
        except (OSError, ValueError):
            return  # the terminal is gone

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _keep_last_row_free(lines: int) -> str:
    # The line feed and the step back up make room where the cursor stands on the last row.
    return f"\n\x1b7\x1b[1;{lines - 1}r\x1b8\x1b[1A"


def rendered(parts: Sequence[str], *, width: int) -> str:
    """Return one line of at most `width` columns, colored by escape sequences."""
    from rich.console import Console
    from rich.text import Text

    line = Text(LABEL, style="reverse")
    for index, part in enumerate(map(one_line, parts)):
        gap = SEPARATOR if index > 0 else " "
        if len(line) + len(gap) + len(part) > width:
            break
        line.append(gap, style="not reverse dim").append(part, style="not reverse")
    line.truncate(max(width, 1))
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with console.capture() as capture:
        console.print(line, end="", no_wrap=True)
    return capture.get()


def parts_of(samples: Sequence[Sample], *, budget_bytes: int, device_budget_bytes: int = 0) -> list[str]:
    """Return what there is to say at the last of the samples, the most interesting first."""
    now = samples[-1]
    recent = between(_sample_before(samples, now.seconds - TRAFFIC_SECONDS), now)
    return [
        *_speeds(_speed_span(samples)),
        f"r/w {_rates(recent.ssd_read_bytes, recent.ssd_written_bytes, recent)}",
        _stalls(between(_sample_before(samples, now.seconds - SPEED_SECONDS), now)),
        *_device(now, recent, device_budget_bytes),
        _memory("memory", sum(now.host_bytes.values()), budget_bytes),
    ]


def _device(now: Sample, recent: Interval, budget_bytes: int) -> list[str]:
    """Return what there is to say of a device, nothing where there is none."""
    if not now.device_bytes:
        return []
    return [
        f"to/from device {_rates(recent.to_device_bytes, recent.to_host_bytes, recent)}",
        _memory("device", sum(now.device_bytes.values()), budget_bytes),
    ]


def _sample_before(samples: Sequence[Sample], seconds: float) -> Sample:
    """Return the last sample that is at least so old, the oldest where none is."""
    return next((sample for sample in reversed(samples) if sample.seconds <= seconds), samples[0])


def _speed_span(samples: Sequence[Sample]) -> Interval | None:
    """Return the last steps that ended, None before the second one."""
    ends = [sample for sample in samples if sample.is_step_end][-SPEED_STEPS - 1 :]
    ends = [sample for sample in ends[:-2] if sample.seconds >= ends[-1].seconds - SPEED_SECONDS] + ends[-2:]
    return between(ends[0], ends[-1]) if len(ends) > 1 else None


def _speeds(span: Interval | None) -> list[str]:
    if span is None or span.seconds <= 0:
        return ["first steps"]
    per_second = span.steps / span.seconds
    speed = f"{per_second:.3g} step/s" if per_second >= 0.1 else f"{1 / per_second:.1f} s/step"
    return [speed, f"{span.tokens / span.seconds:.0f} token/s"] if span.tokens > 0 else [speed]


def _rates(one_way_bytes: int, other_way_bytes: int, span: Interval) -> str:
    seconds = span.seconds if span.seconds > 0 else float("inf")
    return f"{one_way_bytes / seconds / 1e9:.2f}/{other_way_bytes / seconds / 1e9:.2f} GB/s"


def _memory(name: str, used_bytes: int, budget_bytes: int) -> str:
    if budget_bytes < 2**30:
        return f"{name} {used_bytes / 2**20:.0f}/{budget_bytes / 2**20:.0f} MiB"
    return f"{name} {used_bytes / 2**30:.1f}/{budget_bytes / 2**30:.1f} GiB"


def _stalls(span: Interval) -> str:
    share = f"stall {span.stall_share:.0%}"
    if span.stall_share < 0.01:
        return share
    cause = max(span.stall_seconds, key=lambda name: span.stall_seconds[name])
    return f"{share} ({cause})"


def _speaks_for_all() -> bool:
    """Whether this process is the one of a distributed run that shows the line."""
    distributed: Any = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal that can place its cursor."""
    try:
        if stream is None or not stream.isatty():
            return False
        os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal
