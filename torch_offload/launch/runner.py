"""Runs a script or a module in this process as Python itself would, with everything it trains paged.

Child processes that the script starts page as well. What watches the engine (the status line, the report at the end)
follows from the settings, wherever an engine opens.
"""

import functools
import importlib.util
import io
import os
import runpy
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from torch_offload.config import Config
from torch_offload.launch import autopage
from torch_offload.system import environment
from torch_offload.system.terminal import echo

USAGE_STATUS = 2
FAILURE_STATUS = 1
SIGNAL_STATUS = 128


def run(
    config: Config, command: Sequence[str], *, is_module: bool, optimizer: str | None = None, fit: bool = False
) -> int:
    """Run a script to its end and return the exit status that Python would have ended with.

    It takes over the process: arguments, search path, ``__main__`` and environment are the script's from here on.

    Args:
        config: Budget and directory; what is left open is decided when the first large parameter appears.
        command: Path of the script, or name of the module, and its arguments.
        is_module: Whether it is the name of a module, as after ``python -m``.
        optimizer: What a ``Trainer`` creates, a name of ``trainer_optimizer.OPTIMIZERS``; None: what the script says.
        fit: Whether a ``Trainer`` splits the rows of a step as the fastest plan does.
    """
    name, *arguments = command
    if not is_module and not os.path.exists(name):
        return _refuse(f"can't open file {name!r}: no such file or directory", USAGE_STATUS)
    sys.argv = [name, *arguments]
    _set_first_path(os.getcwd() if is_module else _script_directory(name))
    if is_module and not _module_exists(name):
        return _refuse(f"no module named {name}", FAILURE_STATUS)
    launch = environment.Launch(name=uuid.uuid4().hex, config=config, optimizer=optimizer, fit=fit)
    environment.hand_to_children(launch)
    autopage.begin(launch)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, functools.partial(_end_on_signal, os.getpid()))
    return _status_of(lambda: _run_module(name) if is_module else _run_file(name))


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_file(path: str) -> None:
    """Run one source file; what else Python can run (a folder, an archive) is left to the standard library."""
    if not os.path.isfile(path) or path.endswith((".pyc", ".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")
        return
    absolute = os.path.abspath(path)
    main = ModuleType("__main__")
    main.__file__ = absolute
    main.__loader__ = SourceFileLoader("__main__", absolute)
    sys.modules["__main__"] = main
    exec(_compiled(absolute), vars(main))


def _compiled(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _status_of(script: Callable[[], None]) -> int:
    """Return what became of the script, and say it on stderr as Python does."""
    try:
        script()
    except SystemExit as ending:
        return _exit_status(ending.code)
    except KeyboardInterrupt as interrupt:
        _report(interrupt)
        return SIGNAL_STATUS + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 (whatever a script raises ends it, and is printed)
        _report(error)
        return FAILURE_STATUS
    return 0


def _exit_status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return FAILURE_STATUS


def _report(error: BaseException) -> None:
    """Print a traceback that begins in the script."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")


def _end_on_signal(process: int, number: int, frame: FrameType | None) -> None:
    """End as on `exit`, so that half-written files go. A second signal, or one to a forked child, ends at once."""
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != process:
        signal.raise_signal(number)
    raise SystemExit(SIGNAL_STATUS + number)


def _set_first_path(directory: str) -> None:
    """Put the script's directory where Python puts it."""
    if sys.version_info < (3, 11) or not sys.flags.safe_path:  # Python 3.10 always puts it there
        sys.path[0] = directory


def _script_directory(path: str) -> str:
    return os.path.realpath(path) if os.path.isdir(path) else str(Path(os.path.realpath(path)).parent)


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _refuse(reason: str, status: int) -> int:
    echo(f"torch-offload: {reason}", err=True)
    return status
