"""What watches an engine while it runs, as far as its configuration asks for it."""

import atexit
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch_offload import history, live_line
from torch_offload.config import Config

if TYPE_CHECKING:
    from torch_offload.session import Session

logger = logging.getLogger(__name__)


class _AtExit:
    """Where the report of this process goes, None where nobody asked for one."""

    report: Path | None = None


def begin(config: Config, session_source: Callable[[], "Session | None"]) -> None:
    """Start what `config` asks for: recording for a report at the end of the process, the live line.

    Args:
        config: Of the session that has just opened.
        session_source: Returns that session while it is open.
    """
    history.forget()
    session = session_source()
    if session is None:
        return
    if config.live:
        live_line.start(session_source)
    if config.report is not None:
        save_at_exit(config.report)
    if config.report is not None or live_line.is_shown():
        history.start(session.engine.statistics, modules=session.modules)


def end() -> None:
    """Stop recording, before the engine goes. The live line stays for the next session, with nothing to show."""
    history.stop()


def save_at_exit(path: Path) -> None:
    """Write the report of this process when it ends."""
    if _AtExit.report is None:
        atexit.register(_save)
    _AtExit.report = path


def _save() -> None:
    if _AtExit.report is None:
        return
    try:
        written = history.save_report(_AtExit.report)
    except OSError as error:
        logger.error("the report could not be written: %s", error)
        return
    if written is not None:
        logger.info("report in %s", written)
