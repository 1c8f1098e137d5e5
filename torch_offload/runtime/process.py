"""Everything of which a process has one: the open session, what watches it, hooks and replacements that outlive it.

Torch has one CPU allocator and one set of global hooks per process, so there is one engine per process. All state of
this package that is not reached through an object of the user is in :data:`PROCESS`.
"""

import gc
import logging
from pathlib import Path

from torch_offload import _C
from torch_offload.config import Config
from torch_offload.errors import ConfigError
from torch_offload.hooks.patches import LivingPatches
from torch_offload.hooks.registrations import Registrations
from torch_offload.reporting.report import Report
from torch_offload.runtime import monitors
from torch_offload.runtime.provisional_layers import ProvisionalLayers
from torch_offload.runtime.session import Session


class Process:
    """The state of this process.

    Threads: one at a time.

    Attributes:
        registrations: Torch's hooks on registration.
        provisional_layers: Dense layers that a quantizer is about to replace.
        coded_experts: Replacements that models with coded experts need.
        report_callbacks: Replacements that callbacks of a ``Trainer`` need.
        autopage: What pages models of a script that does not wrap them itself, once a launcher has started it.
    """

    def __init__(self) -> None:
        self.registrations = Registrations()
        self.provisional_layers = ProvisionalLayers()
        self.coded_experts = LivingPatches()
        self.report_callbacks = LivingPatches()
        self.autopage: object | None = None
        self._session: Session | None = None
        self._last_report: Report | None = None

    @property
    def session(self) -> Session | None:
        """The open session, if any."""
        return self._session

    @property
    def last_report(self) -> Report | None:
        """The figures at the end of the session before, if there was one."""
        return self._last_report

    def open_session(self, config: Config) -> Session:
        """Return the session to wrap a module into: the open one, or a new one.

        Args:
            config: With ``ram`` and ``ssd`` decided unless there is a session.

        Raises:
            ConfigError: If a setting differs from the open session's. The message names it.
            OffloadError: If an engine cannot be started.
        """
        session = self.joinable(config)
        if session is None:
            self.close_session()
            _C.set_log_level(logging.getLogger("torch_offload").getEffectiveLevel())
            session = self._session = Session(config, self.registrations, self.provisional_layers)
            monitors.begin(config, lambda: self._session)
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

    def close_session(self) -> None:
        """Close the session, if one is open, and keep its last report."""
        session, self._session = self._session, None
        if session is not None:
            monitors.end()
            self._last_report = session.report()
            session.close()


def _difference(requested: Config, running: Config) -> str | None:
    for name in sorted(requested.model_fields_set):
        value, current = getattr(requested, name), getattr(running, name)
        if isinstance(value, Path):
            value = value.resolve()
        if value is not None and value != current:
            return f"the engine runs with {name}={current!r}, not {value!r}"
    return None


PROCESS = Process()
"""The one object of its class."""
