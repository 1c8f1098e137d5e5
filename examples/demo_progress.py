"""Says what the demo is doing: a line that moves on a terminal, elsewhere a new line about every ten seconds."""

import threading
import time
from types import TracebackType

from rich.console import Console

INTERVAL_SECONDS = 10.0


class Progress:
    """Shows the current activity while the context is open.

    Args:
        label: Stands before each activity.
        console: Where it is shown. Default: stderr, since what a program prints may be read by another.
        interval_seconds: Between two lines where the console is no terminal.
    """

    def __init__(
        self, label: str, *, console: Console | None = None, interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._label = label
        self._console = console or Console(stderr=True)
        self._interval_seconds = interval_seconds
        self._status = self._console.status(label) if self._console.is_terminal else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._started = time.perf_counter()
        self._activity = "starting"

    def show(self, activity: str) -> None:
        """Name what is done now."""
        self._activity = activity
        if self._status is not None:
            self._status.update(self._line())

    def __enter__(self) -> "Progress":
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._status is not None:
            self._status.stop()
        if error is None:
            self._print(f"{self._label}: done after {self._seconds():.0f} s")

    def _repeat(self) -> None:
        while not self._ended.wait(1.0 if self._status is not None else self._interval_seconds):
            if self._status is not None:
                self._status.update(self._line())
            else:
                self._print(self._line())

    def _line(self) -> str:
        return f"{self._label}: {self._activity}, {self._seconds():.0f} s"

    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()
