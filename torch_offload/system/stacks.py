"""The Python stacks of this process, and the signal that asks for them."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

from torch_offload.system.kernel_files import field_of

NUMBER = signal.SIGUSR1


def python_stacks() -> str:
    """Return what every thread runs, the most recent call first, and which thread of the system each is.

    Threads: any that holds the GIL, so that all others stand still; not for handlers of signals.
    """
    threads = [f"0x{each.ident or 0:016x} is thread {each.native_id} ({each.name})" for each in threading.enumerate()]
    # A file without a name: what is written to a pipe or a socket may have to wait for its reader.
    with os.fdopen(os.memfd_create("torch_offload_stacks"), "rb") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return "\n".join([*threads, file.read().decode(errors="replace")])


class StackSignal:
    """SIGUSR1: the Python stack of the main thread on stderr, at once, and whatever `ask` has others do.

    The stack comes from the handler itself, so also while the interpreter is stuck; `ask` is called once it is not.
    That of the thread which runs the handler only: another thread's frames may be freed while they are read, which has
    ended processes.
    Threads: the main one.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """Change nothing before :meth:`install`.

        Args:
            ask: Called on the main thread between any two instructions: it must not wait for a lock.
        """
        self._ask = ask
        self._process = os.getpid()
        self._is_installed = False

    def install(self) -> None:
        """Handle the signal, unless somebody else does, this is not the main thread, or stderr is no file."""
        stderr = _stderr_file()
        if stderr is None or threading.current_thread() is not threading.main_thread() or _is_handled():
            return
        signal.signal(NUMBER, self._handle)
        faulthandler.register(NUMBER, file=stderr, all_threads=False, chain=True)
        self._is_installed = True

    def remove(self) -> bool:
        """Put the default back, unless somebody else has taken the signal. Safe to call twice.

        Returns:
            False if `ask` may still be called: only the main thread can put it back.
        """
        if not self._is_installed:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        self._is_installed = False
        faulthandler.unregister(NUMBER)
        if signal.getsignal(NUMBER) == self._handle:
            signal.signal(NUMBER, signal.SIG_DFL)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._process == os.getpid():
            self._ask()


def _is_handled() -> bool:
    """Whether there is a handler: of Python, or one that Python does not know, such as another ``faulthandler``'s."""
    if signal.getsignal(NUMBER) is not signal.SIG_DFL:
        return True
    mask = field_of(Path("/proc/self/status"), "SigCgt")
    return mask is not None and bool(int(mask, 16) >> (NUMBER - 1) & 1)


def _stderr_file() -> TextIO | None:
    """Return stderr, or the one that the interpreter began with where it was replaced by what is no file."""
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                stream.fileno()
                return stream
        except (OSError, ValueError, AttributeError):
            continue
    return None
