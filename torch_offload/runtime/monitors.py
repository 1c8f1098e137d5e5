"""The monitors of an engine, as far as its configuration asks for them: recorder, status line, watchdog, files."""

import atexit
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from torch_offload.config import Config
from torch_offload.reporting.recorder import Recorder
from torch_offload.reporting.status_line import StatusLine, Watched, is_terminal
from torch_offload.reporting.timeline import Timeline
from torch_offload.runtime.watchdog import Watchdog
from torch_offload.system import environment


class Monitored(Protocol):
    """An open session."""

    config: Config
    most_ram_bytes: int

    def statistics(self) -> Mapping[str, Any]:
        """Return the figures of the engine."""

    def dump(self) -> Mapping[str, Any]:
        """Return what the engine does at this moment."""

    def modules(self) -> Iterable[nn.Module]:
        """Return the wrapped modules."""


class Monitors:
    """Those of one process. The status line stays from one session to the next.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.report_path: Path | None = None
        self.trace_path: Path | None = None
        self.compares = False
        self._recorded: Timeline | None = None
        self._status_line: StatusLine | None = None
        self._watchdog: Watchdog | None = None

    def begin(self, session: Monitored) -> None:
        """Start what the configuration of a session that has just opened asks for."""
        self.end()
        self._recorded = None
        config = session.config
        if config.watchdog:
            self._watchdog = Watchdog(session, directories=config.directories_of(environment.local_rank()))
            self._watchdog.start()
            atexit.register(self._watchdog.stop)
        if config.status_line:
            self._show_status_line()
        self.report_path = config.report or self.report_path
        self.compares = self.compares or config.plan is not None
        if isinstance(config.trace, Path):
            self.trace_path = config.trace
        if config.report is None and config.plan is None and self._status_line is None:
            return
        self.recorder = Recorder(session)
        self.recorder.start()
        atexit.register(self.recorder.stop)  # a thread that is in the engine when Python ends would abort the process
        if self._status_line is not None:
            device_bytes = config.compute_bytes if config.gpu else 0
            self._status_line.watch(
                Watched(recorder=self.recorder, budget_bytes=session.most_ram_bytes, device_budget_bytes=device_bytes)
            )

    def end(self) -> None:
        """Stop recording and watching, before the engine goes. Safe to call twice."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()
            atexit.unregister(watchdog.stop)
        if self._status_line is not None:
            self._status_line.watch(None)
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.stop()
            atexit.unregister(recorder.stop)
            self._recorded = recorder.timeline()

    def timeline(self) -> Timeline | None:
        """Return what was recorded of this session, or of the last one where none is recorded now."""
        return self._recorded if self.recorder is None else self.recorder.timeline()

    def stop(self) -> None:
        """End, and give the terminal back. Safe to call twice."""
        self.end()
        line, self._status_line = self._status_line, None
        if line is not None:
            line.stop()
            atexit.unregister(self.stop)

    def _show_status_line(self) -> None:
        """Show the line, unless stderr is no terminal or there is one already."""
        if self._status_line is None and is_terminal(sys.stderr):
            self._status_line = StatusLine(sys.stderr)
            self._status_line.start()
            atexit.register(self.stop)
