"""What a process has left of the system's limits, and what was complained of lately: the end of a dump."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch_offload.config import format_size
from torch_offload.system import resources
from torch_offload.system.kernel_files import lines_of
from torch_offload.system.threads import BackgroundThread

PACKAGE_LOGGER = "torch_offload"
KEPT_WARNINGS = 20
DISK_ANSWER_SECONDS = 1.0
"""A file system that hangs, such as one of a server that is gone, does not say what is free."""


class RecentWarnings(logging.Handler):
    """Keeps the last warnings and errors of the package and its engine.

    Threads: any.
    """

    def __init__(self) -> None:
        """Keep nothing before :meth:`install`."""
        super().__init__(logging.WARNING)
        self._records: deque[logging.LogRecord] = deque(maxlen=KEPT_WARNINGS)

    def install(self) -> None:
        """Keep from now on."""
        logging.getLogger(PACKAGE_LOGGER).addHandler(self)

    def remove(self) -> None:
        """Keep no more. Safe to call twice."""
        logging.getLogger(PACKAGE_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self._records.append(record)

    def lines(self) -> Iterator[str]:
        """Yield how many there are and each with its time, the oldest first."""
        records = list(self._records)
        yield f"  last warnings: {len(records) or 'none'}"
        for record in records:
            yield f"    {time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}"


class FreeSpace:
    """Asks file systems what is free, without waiting for one that does not answer.

    Threads: one at a time.
    """

    def __init__(self, directories: Sequence[Path], *, ask: Callable[[Path], int] = resources.free_disk_bytes) -> None:
        """Ask nothing before :meth:`lines`."""
        self._directories = directories
        self._ask = ask
        self._asking: dict[Path, BackgroundThread] = {}
        self._answers: dict[Path, str] = {}

    def lines(self) -> Iterator[str]:
        """Yield what each directory's file system says within a second; one that was asked before is not asked again
        until it has answered.
        """
        for directory in self._directories:
            if directory not in self._asking:
                self._answers.pop(directory, None)
                asking = BackgroundThread(partial(self._note_answer, directory))
                self._asking[directory] = asking
                if not asking.start():
                    self._answers[directory] = "not known, there is no room for a thread that asks"
        deadline = time.monotonic() + DISK_ANSWER_SECONDS
        for directory, asking in list(self._asking.items()):
            if asking.join(max(0.0, deadline - time.monotonic())):
                del self._asking[directory]
            answer = self._answers.get(directory, "not known, the file system has not answered for a second")
            yield f"  free in {directory}: {answer}"

    def _note_answer(self, directory: Path) -> None:
        try:
            self._answers[directory] = format_size(self._ask(directory))
        except OSError as error:
            self._answers[directory] = f"not known, {error}"


def mapping_line(*, root: Path = Path("/")) -> str:
    """Say how many memory mappings this process has, and how many it may have."""
    count = len(lines_of(root / "proc/self/maps"))
    most = resources.max_mappings(root=root)
    return f"  memory mappings: {count:,} of {'a number that is not known' if most is None else f'{most:,}'}"
