"""What watches an engine while it runs, as far as its configuration asks for it."""

import atexit
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch_offload.config import Config
from torch_offload.errors import ConfigError
from torch_offload.reporting import recorder, status_line

if TYPE_CHECKING:
    from torch_offload.runtime.session import Session

logger = logging.getLogger(__name__)


class _AtExit:
    """What of this process goes where, as far as somebody asked for it."""

    report: Path | None = None
    trace: Path | None = None


def begin(config: Config, session_source: Callable[[], "Session | None"]) -> None:
    """Start what `config` asks for: recording for a report at the end of the process, the live line.

    Args:
        config: Of the session that has just opened.
        session_source: Returns that session while it is open.
    """
    recorder.forget()
    session = session_source()
    if session is None:
        return
    if config.live:
        status_line.start(session_source)
    if config.report is not None:
        save_at_exit(report=config.report)
    if isinstance(config.trace, Path):
        save_at_exit(trace=config.trace)
    if config.report is not None or status_line.is_shown():
        recorder.start(session.engine.statistics, modules=session.modules)


def end() -> None:
    """Stop recording, before the engine goes. The live line stays for the next session, with nothing to show."""
    recorder.stop()


def save_at_exit(*, report: Path | None = None, trace: Path | None = None) -> None:
    """Write the report, or the trace, of this process when it ends."""
    if _AtExit.report is None and _AtExit.trace is None:
        atexit.register(_save_all)
    _AtExit.report = report or _AtExit.report
    _AtExit.trace = trace or _AtExit.trace


def _save_all() -> None:
    for what, path, save in (
        ("report", _AtExit.report, recorder.save_report),
        ("trace", _AtExit.trace, recorder.save_trace),
    ):
        if path is not None:
            _save(what, path, save)


def _save(what: str, path: Path, save: Callable[[Path], Path | None]) -> None:
    try:
        written = save(path)
    except (OSError, ConfigError) as error:
        logger.error("the %s could not be written: %s", what, error)
        return
    if written is not None:
        logger.info("%s in %s", what, written)
