"""Threads that do without: where the system has no room for one, whoever started it is told, and never waits for it.

``threading.Thread.start`` waits until the new thread has begun. One that finds no memory for its first call ends before
that, and is waited for for ever.
"""

import _thread
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any


class BackgroundThread:
    """A thread that does not keep the process from ending.

    Threads: one starts it; any may join it.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        """Start nothing before :meth:`start`.

        Args:
            body: Run by the thread.
        """
        self._body: Callable[[], None] | None = body
        self._ended: SimpleQueue[object] = SimpleQueue()
        self._token_reference: weakref.ref[_Token] | None = None

    def start(self) -> bool:
        """Start the thread, if there is room for one; returns whether it was. It may end before it has begun."""
        body, self._body = self._body, None
        try:
            token = _Token()
            # Called in C, by which thread ever lets the token go: there may be no memory for a call of Python.
            self._token_reference = weakref.ref(token, self._ended.put)
            held = [token, body]
            del token, body
            _thread.start_new_thread(_run, (held,))
        except (RuntimeError, MemoryError):
            self._ended.put(None)
            return False
        return True

    def is_current(self) -> bool:
        """Return whether it is this thread that asks."""
        token = None if self._token_reference is None else self._token_reference()
        return token is not None and token.ident == _thread.get_ident()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it has ended; returns whether it has. Pre: :meth:`start` was called."""
        try:
            self._ended.put(self._ended.get(timeout=timeout_seconds))
        except Empty:
            return False
        return True


class _Token:
    """What a thread holds as long as it is there."""

    ident: int | None = None


def _run(held: list[Any]) -> None:
    """Call the second; let it go, and then the first. An error that outlives the thread keeps this frame."""
    try:
        held[0].ident = _thread.get_ident()
        held[1]()
    finally:
        held.pop()
        held.pop()


class BackgroundWork:
    """Work that threads carry out as far as there are any; what none of them has begun, :meth:`Work.finish` does."""

    def __init__(self, count: int) -> None:
        """Have up to `count` threads, each started when there is work for it."""
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._most = count
        self._threads: list[BackgroundThread] = []

    def submit(self, body: Callable[[], None]) -> "Work":
        """Have work done; whoever needs it calls :meth:`Work.finish`."""
        work = Work(body)
        self._queue.put(work)
        if len(self._threads) < self._most:
            thread = BackgroundThread(self._serve)
            thread.start()
            self._threads.append(thread)
        return work

    def close(self) -> None:
        """End the threads. Work that was submitted before is done or left out when this returns."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()


class Work:
    """A call that is made once, by a thread or by who waits for it."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._done: Future[None] = Future()

    def run(self) -> None:
        """Make the call, unless somebody else has begun to or :meth:`leave_out` was called."""
        if not self._done.set_running_or_notify_cancel():
            return
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001 (`finish` raises it)
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def finish(self) -> None:
        """Return when the call has been made; raises what it raised."""
        if self._done.cancel():
            self._body()
        else:
            self._done.result()

    def leave_out(self) -> None:
        """Have the call not be made, or wait until it has been; its error is nobody's."""
        if not self._done.cancel():
            self._done.exception()
