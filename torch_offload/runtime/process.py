"""Everything of which a process has one: the open session, what watches it, hooks and replacements that outlive it.

Torch has one CPU allocator and one set of global hooks per process, so there is one engine per process. All state of
this package that is not reached through an object of the user is in :data:`PROCESS`.
"""

import atexit
import gc
import logging
from collections.abc import Hashable
from pathlib import Path

from torch_offload import _C
from torch_offload.config import Config
from torch_offload.errors import ConfigError
from torch_offload.hooks.patches import LivingPatches
from torch_offload.hooks.registrations import Registrations
from torch_offload.reporting.report import Report, plan_lines
from torch_offload.reporting.saved_reports import report_file, trace_file
from torch_offload.runtime.monitors import Monitors
from torch_offload.runtime.node_budget import NodeBudget
from torch_offload.runtime.provisional_layers import ProvisionalLayers
from torch_offload.runtime.session import Session
from torch_offload.system import environment
from torch_offload.system.terminal import echo

logger = logging.getLogger(__name__)


class Process:
    """The state of this process.

    Threads: one at a time.

    Attributes:
        registrations: Torch's hooks on registration.
        provisional_layers: Dense layers that a quantizer is about to replace.
        coded_experts: Replacements that models with coded experts need.
        report_callbacks: Replacements that callbacks of a ``Trainer`` need.
        monitors: Recorder, status line, files at the exit.
        operator_seconds: Times of operator calls, which plans have measured; None for a call that cannot be timed.
        autopage: What pages models of a script that does not wrap them itself, once a launcher has started it.
    """

    def __init__(self) -> None:
        self.registrations = Registrations()
        self.provisional_layers = ProvisionalLayers()
        self.coded_experts = LivingPatches()
        self.report_callbacks = LivingPatches()
        self.monitors = Monitors()
        self.operator_seconds: dict[Hashable, float | None] = {}
        self.autopage: object | None = None
        self._saves_at_exit = False
        self._session: Session | None = None
        self._last_report: Report | None = None

    @property
    def session(self) -> Session | None:
        """The open session, if any."""
        return self._session

    def report(self) -> Report | None:
        """Return the report of the open session, or the last one of the session before; None if there was none."""
        session = self._session
        return self._last_report if session is None else session.report(self.monitors.timeline())

    def open_session(self, config: Config, *, node: NodeBudget | None = None) -> Session:
        """Return the session to wrap a module into: the open one, or a new one.

        Args:
            config: With ``ram`` and ``ssd`` decided unless there is a session.
            node: Of which a new session's ``ram`` is a part; None: it is this process's alone.

        Raises:
            ConfigError: If a setting differs from the open session's. The message names it.
            OffloadError: If an engine cannot be started.
        """
        session = self.joinable(config)
        if session is None:
            self.close_session()
            _C.set_log_level(logging.getLogger("torch_offload").getEffectiveLevel())
            session = self._session = Session(config, self.registrations, self.provisional_layers, node)
            try:
                self.monitors.begin(session)
            except BaseException:
                self.close_session()
                raise
            self._save_files_at_exit()
        return session

    def joinable(self, config: Config) -> Session | None:
        """Return the open session if modules are wrapped in it.

        Raises:
            ConfigError: If `config` asks for what that session does not have.
        """
        session = self._session
        if session is not None and _difference(config, session.config) is not None:
            gc.collect()  # a module in a reference cycle may be waiting to go
        if session is None or session.is_idle():
            return None
        difference = _difference(config, session.config)
        if difference is not None:
            raise ConfigError(
                f"{difference}; modules share one engine: unwrap the others first, or leave the setting out"
            )
        return session

    def close_if_unused(self) -> None:
        """Close the session once nothing is paged any more."""
        session = self._session
        if session is not None and session.is_idle() and not session.has_pages():
            self.close_session()

    def save_report(self, path: Path) -> Path | None:
        """Write the report of this process as JSON; several processes may name one directory.

        Args:
            path: A file, or a directory for a file of this process; one is made where the name has no suffix.

        Returns:
            The file, None where nothing was ever wrapped.

        Raises:
            OSError: If the file cannot be written.
        """
        report, target = self.report(), report_file(path)
        if report is None:
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        report.write_json(target)
        return target

    def save_trace(self, path: Path) -> Path | None:
        """Write the trace of this process, for a ``trace`` setting; otherwise as :meth:`save_report`.

        Raises:
            ConfigError: If none was recorded.
        """
        report, target = self.report(), trace_file(path)
        if report is None:
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        report.write_trace(target)
        return target

    def _save_files_at_exit(self) -> None:
        paths = (self.monitors.report_path, self.monitors.trace_path)
        is_asked_for = self.monitors.compares or any(path is not None for path in paths)
        if is_asked_for and not self._saves_at_exit:
            atexit.register(self._save_files)
            self._saves_at_exit = True

    def _save_files(self) -> None:
        for name, path, save in (
            ("report", self.monitors.report_path, self.save_report),
            ("trace", self.monitors.trace_path, self.save_trace),
        ):
            if path is None:
                continue
            try:
                written = save(path)
            except (OSError, ConfigError) as error:
                logger.error("cannot write the %s to %s: %s", name, path, error)
                continue
            if written is not None:
                logger.info("wrote the %s to %s", name, written)

        if self.monitors.compares:
            self._say_comparison()

    def _say_comparison(self) -> None:
        """Write to stderr what a plan predicted beside what this process measured."""
        report = self.report()
        if report is None:
            return
        if report.comparison is None:
            logger.warning("plan: nothing to compare: fewer than two steps of an optimizer were recorded")
        for line in plan_lines(report.comparison):
            echo(f"torch-offload: {line}", err=True)

    def close_session(self) -> None:
        """Close the session, if one is open, and keep its last report."""
        session, self._session = self._session, None
        if session is not None:
            try:
                self.monitors.end()
                self._last_report = session.report(self.monitors.timeline())
            finally:
                session.close()


def _difference(requested: Config, running: Config) -> str | None:
    for name in sorted(requested.model_fields_set):
        value, current = getattr(requested, name), getattr(running, name)
        if isinstance(value, Path):
            value = value.resolve()
        if name == "ssd":
            value = requested.ssd if requested.stores else requested.directories_of(environment.local_rank())
        if value is not None and value != current:
            return f"the engine runs with {name}={current!r}, not {value!r}"
    return None


PROCESS = Process()
"""The one object of its class."""
