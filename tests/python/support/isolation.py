"""Runs a function in a process of its own: a crash is the failure of one test, and an engine belongs to one test.

Processes are forked from a server that has imported the slow packages already and has run nothing with them.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SLOW_PACKAGES = ("torch", "transformers", "transformers.trainer", "peft")
"""Imported once by what children are forked from."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(SLOW_PACKAGES))


class ChildCrashError(AssertionError):
    """The process ended without an answer."""


def describe_exit(code: int | None) -> str:
    """Name a signal where there was one."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 (the parent raises it)
        sender.send((False, traceback.format_exc()))


def start_child(function: Callable[..., Any], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Start `function(*arguments)` in a fresh process that the caller has to end."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def in_child(function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 300) -> Any:
    """Return what `function(*arguments)` returns in a fresh process; both must be importable by name and picklable.

    Raises:
        ChildCrashError: If the process died; the message names the signal.
        AssertionError: If the function raised; the message is its traceback.
        TimeoutError: If there was no answer in time.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = start_child(_answer, sender, function, arguments)
    sender.close()
    try:
        if not receiver.poll(timeout_seconds):
            raise TimeoutError(f"{function.__name__}{arguments} gave no answer in {timeout_seconds} s")
        succeeded, answer = receiver.recv()
    except EOFError:
        process.join()
        raise ChildCrashError(f"{function.__name__}{arguments}: {describe_exit(process.exitcode)}") from None
    finally:
        if process.is_alive() and not receiver.closed:
            process.join(1)
        process.kill()
        process.join()
        receiver.close()
    assert succeeded, answer
    return answer
