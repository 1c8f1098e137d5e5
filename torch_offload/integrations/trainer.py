"""The engine's figures among the logs of a ``Trainer``, so that whatever tracker is on gets them.

Trackers are callbacks that read the logs in the order in which they were added, those that a user adds last. So the
figures are put into the logs before the first callback sees them.
"""

import time
from collections.abc import Callable, MutableMapping
from typing import Any

from transformers import trainer as trainers
from transformers import trainer_callback as callbacks

from torch_offload.hooks import replaced_functions
from torch_offload.reporting.timeline import Interval, Sample, between
from torch_offload.runtime.process import PROCESS

PREFIX = "offload/"


class ReportCallback(callbacks.TrainerCallback):
    """Adds figures per step, since the logs before, to the logs of training: ``offload/stall_share`` and others.

    Use: ``Trainer(..., callbacks=[torch_offload.ReportCallback()])``. Nothing is added while no model is wrapped.
    """

    def __init__(self) -> None:
        """Make every ``Trainer`` ask its ReportCallbacks first when it logs."""
        PROCESS.report_callbacks.keep_for(self)
        self._before: Sample | None = None
        self._start_seconds = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Count from here."""
        self._before = self._sample(state.global_step)

    def add_figures(self, logs: MutableMapping[str, Any], *, step: int) -> None:
        """Put the figures since the last call into the logs of a training step."""
        now = self._sample(step)
        if now is None or "loss" not in logs:
            return
        before, self._before = self._before, now
        if before is not None and now.steps > before.steps:
            memory_bytes = sum(now.host_bytes.values())
            logs.update(scalars(between(before, now)) | {f"{PREFIX}memory_GB": memory_bytes / 1e9})

    def _sample(self, step: int) -> Sample | None:
        session = PROCESS.session
        if session is None:
            return None
        return Sample.from_statistics(
            session.engine.statistics(),
            seconds=time.monotonic() - self._start_seconds,
            steps=step,
            tokens=0,
            is_step_end=True,
        )


def scalars(span: Interval) -> dict[str, float]:
    """Return the figures of some steps by their names in the logs."""
    found = {
        "seconds_per_step": span.seconds / span.steps,
        "ssd_read_GB_per_step": span.ssd_read_bytes / span.steps / 1e9,
        "ssd_written_GB_per_step": span.ssd_written_bytes / span.steps / 1e9,
        "stall_share": span.stall_share,
    }
    if span.seconds > 0:
        found |= {f"stall_share_{cause}": seconds / span.seconds for cause, seconds in span.stall_seconds.items()}
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def install() -> None:
    """Give every ``Trainer`` that is made from now on a ReportCallback. Safe to call twice."""
    defaults: list[Any] = trainers.DEFAULT_CALLBACKS
    if ReportCallback not in defaults:
        defaults.append(ReportCallback)


def uninstall() -> None:
    """Undo :func:`install`."""
    defaults: list[Any] = trainers.DEFAULT_CALLBACKS
    if ReportCallback in defaults:
        defaults.remove(ReportCallback)


def _log_figures_first(original: Callable[..., Any], handler: Any, *args: Any, **options: Any) -> Any:
    """Ask the ReportCallbacks of a Trainer for their figures before its callbacks read the logs."""
    state, logs = args[1], args[3] if len(args) > 3 else options["logs"]
    for callback in handler.callbacks:
        if isinstance(callback, ReportCallback):
            callback.add_figures(logs, step=state.global_step)
    return original(handler, *args, **options)


PROCESS.report_callbacks.provide(lambda patches: patches.replace(replaced_functions.CALLBACK_LOG, _log_figures_first))
