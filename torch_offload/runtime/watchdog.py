"""Says what every thread does, and what the engine waits for, when nothing moves or when somebody asks.

It only looks and tells: nothing that the program does is changed or ended by it.
"""

import logging
import os
import select
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torch_offload.reporting.engine_dump import dump_text, wait_text, waits_of
from torch_offload.runtime.surroundings import FreeSpace, RecentWarnings, mapping_line
from torch_offload.system.dump_socket import DumpSocket
from torch_offload.system.stacks import StackSignal, python_stacks
from torch_offload.system.terminal import tell
from torch_offload.system.threads import BackgroundThread

logger = logging.getLogger(__name__)

RECENT_STEPS = 64
MIN_STEPS = 2
MAX_PERIODS = 10
"""Of time in which this thread did not run, such as while the process was stopped, no more counts."""


class Watched(Protocol):
    """An open session."""

    def statistics(self) -> Mapping[str, Any]:
        """Return the figures of the engine, and hand its log lines to Python."""

    def dump(self) -> Mapping[str, Any]:
        """Return what the engine does at this moment."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to look, and when to tell."""

    period_seconds: float = 1.0
    still_seconds: float = 60.0
    still_steps: float = 20.0
    repeat_seconds: float = 600.0


class Stillness:
    """For how long nothing has moved, and whether that is to be told.

    Threads: any notes steps, one looks.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        """Begin with a moment in which something moved."""
        self._limits = limits
        self._lock = threading.Lock()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_step_end: float | None = None
        self._steps = 0
        self._moved: object = None
        self._looked = now
        self._told_seconds: float | None = None
        self.seconds = 0.0

    @property
    def steps(self) -> int:
        """The optimizer steps that have ended."""
        with self._lock:
            return self._steps

    def note_step(self, now: float) -> None:
        """An optimizer step has ended."""
        with self._lock:
            if self._last_step_end is not None:
                self._step_seconds.append(now - self._last_step_end)
            self._last_step_end = now
            self._steps += 1

    def look(self, moved: object, now: float) -> None:
        """Compare what grows with each movement with what it was."""
        moved = (moved, self.steps)
        passed = min(now - self._looked, MAX_PERIODS * self._limits.period_seconds)
        self._looked = now
        if moved == self._moved:
            self.seconds += passed
            return
        self._moved = moved
        self._told_seconds = None
        self.seconds = 0.0

    def is_to_be_told(self) -> bool:
        """Whether it is long, and was not told lately."""
        if self._told_seconds is not None:
            return self.seconds - self._told_seconds >= self._limits.repeat_seconds
        with self._lock:
            step_seconds = statistics.median(self._step_seconds) if self._step_seconds else 0.0
        return self.seconds >= max(self._limits.still_seconds, self._limits.still_steps * step_seconds)

    def note_told(self) -> None:
        """It is told once, and again only after a while."""
        self._told_seconds = self.seconds


class Watchdog:
    """A thread that looks at the engine once a second.

    Each look also hands the engine's log lines to Python's logging. Without it they wait for the next call into the
    engine, which a program that hangs does not make.

    It tells when nothing moves although a thread waits in the engine or training had begun, and when SIGUSR1 or
    ``torch-offload dump`` asks.

    Threads: its own looks; :meth:`start` and :meth:`stop` are for one thread, the main one if SIGUSR1 is to ask.
    """

    def __init__(
        self,
        watched: Watched,
        *,
        directories: Sequence[Path] = (),
        limits: Limits = Limits(),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch nothing before :meth:`start`.

        Args:
            watched: An engine.
            directories: Where its pages are.
            limits: When to look and to tell.
            stream: Where it tells; None: what ``sys.stderr`` is then.
            clock: Seconds.
        """
        self._watched = watched
        self._limits = limits
        self._stream = stream
        self._clock = clock
        self._process = os.getpid()
        self._stillness = Stillness(limits, clock())
        self._hook: RemovableHandle | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_ending = False
        self._is_asked = False
        self._warnings = RecentWarnings()
        self._free_space = FreeSpace(directories)
        self._socket = DumpSocket()
        self._signal = StackSignal(self._ask)
        self._thread: BackgroundThread | None = None

    def start(self) -> None:
        """Watch and listen from now on."""
        try:
            self._socket.open()
        except OSError as error:
            logger.warning("torch-offload dump will not reach this process: %s", error)
        self._warnings.install()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._thread = BackgroundThread(self._run)
        if not self._thread.start():
            logger.warning("there is no room for another thread: nothing watches this process or answers dumps")
            self._socket.close()
        self._signal.install()

    def stop(self) -> None:
        """Watch no more and put everything back. Safe to call twice; nothing in a forked child."""
        if self._process != os.getpid() or self._is_ending:
            return
        is_signal_free = self._signal.remove()
        self._warnings.remove()
        if self._hook is not None:
            self._hook.remove()
        self._is_ending = True
        os.eventfd_write(self._wake, 1)
        has_ended = self._thread is None or (not self._thread.is_current() and self._thread.join())
        self._socket.close()
        if is_signal_free and has_ended:
            os.close(self._wake)

    def look(self) -> None:
        """See whether anything has moved since the last look, and tell if that is long ago."""
        self._stillness.look(_moves(self._watched.statistics()), self._clock())
        if not self._stillness.is_to_be_told():
            return
        dump = self._watched.dump()
        waits = [wait for wait in waits_of(dump) if wait["seconds"] >= self._limits.period_seconds]
        if waits or self._stillness.steps >= MIN_STEPS:
            self._stillness.note_told()
            self._tell(f"{self._alarm(dump, waits)}\n{self._everything(dump)}")

    def _alarm(self, dump: Mapping[str, Any], waits: list[Mapping[str, Any]]) -> str:
        if waits and any(part["transfers"] for part in dump.values()):
            found = f"{wait_text(waits[0])}. The disk may hang: see the kernel's log (dmesg)"
        elif waits:
            found = f"{wait_text(waits[0])}, and no transfer is under way"
        else:
            found = "no thread waits in the engine. The program computes, or waits for something else: data, a process"
        minutes = self._limits.repeat_seconds / 60
        return (
            f"torch_offload: nothing has moved in process {self._process} for {self._stillness.seconds:.0f} s: no page "
            f"was used, read or written, and no optimizer step ended; {found}. The stacks below say where. It goes on; "
            f"this comes again every {minutes:.0f} minutes."
        )

    def _run(self) -> None:
        while not self._is_ending:
            try:
                self._turn()
            except Exception:
                logger.exception("the watchdog has ended; training goes on without it")
                self._socket.close()
                return

    def _turn(self) -> None:
        """Wait for somebody who asks, for a second at most, then look."""
        listening = self._socket.fileno()
        poll = select.poll()
        for descriptor in (self._wake, listening):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(self._limits.period_seconds * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._is_ending:
            return
        if self._is_asked:
            self._is_asked = False
            found = self._everything(self._watched.dump())
            self._tell(f"torch_offload: SIGUSR1 asked process {self._process} what it does.\n{found}")
        if listening in ready:
            self._socket.answer(lambda: self._everything(self._watched.dump()))
        self.look()

    def _ask(self) -> None:
        """On the main thread, in the handler of a signal: it may be in the middle of anything."""
        self._is_asked = True
        os.eventfd_write(self._wake, 1)

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if self._process == os.getpid():
            self._stillness.note_step(self._clock())

    def _everything(self, dump: Mapping[str, Any]) -> str:
        stacks = f"Python stacks of process {os.getpid()}:\n{python_stacks()}"
        return "\n".join([stacks, "The engine:", dump_text(dump), *self._process_lines()])

    def _process_lines(self) -> Iterator[str]:
        yield "process:"
        yield mapping_line()
        yield from self._free_space.lines()
        yield from self._warnings.lines()

    def _tell(self, text: str) -> None:
        tell(text, sys.stderr if self._stream is None else self._stream)


def _moves(figures: Mapping[str, Any]) -> int:
    """Return what grows whenever the program uses a page or one moves."""
    device = figures.get("device", {})
    moved = [figures["read_bytes"], figures["written_bytes"]]
    moved += [device[name] for name in ("to_device_bytes", "to_host_bytes") if name in device]
    byte_count: int = sum(sum(by_kind.values()) for by_kind in moved)
    return byte_count + int(figures["pins"]) + int(figures["faults"])
