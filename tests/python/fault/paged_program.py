"""A program as users write it, which a harness disturbs: it pages a module, trains, saves, reports and unwraps.

It meets an error as a user would: it waits until the fault is over, loads the state from before where the package says
that a step was left half-way, and does again what raised. What it has then is held against plain torch, bit for bit.
"""

import functools
import gc
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from support.bits import fingerprint
from support.failing_steps import OPTIMIZERS, Run, is_saving_refused, told_of_the_rest

import torch_offload
from fault.case_runner import DefectError, Report, Verdict
from torch_offload import Config, OffloadError, TierIOError
from torch_offload.runtime import session
from torch_offload.runtime.process import PROCESS

PHASES = ("wrap", "step", "save", "report", "close", "exit")
STEPS = 3
BUDGET = "576KiB"  # of 1.5 MiB of weights, gradients and two moments
MODEL, FIGURES, EXIT_REPORT = "model.safetensors", "figures.json", "report.json"
FILES = {MODEL, FIGURES, EXIT_REPORT}
OLD_FIGURES = b'{"of": "an earlier run"}\n'
_MOST_TRIES = 4  # an error of a write in the background is raised when it is known, and once
_LEAST_MESSAGE = 20
_SETTLING_SECONDS = 2.0


class Training(Run):
    """In memory until somebody wraps it."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["fused"], None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, for a file."""
        states = self.optimizer.state_dict()["state"]
        moments = {f"{number}.{key}": value for number, state in states.items() for key, value in state.items()}
        return self.module.state_dict() | moments


@dataclass(frozen=True)
class Expected:
    """What plain torch has, before the first step and after each, and what it saves before and after."""

    states: list[bytes]
    fingerprints: list[Any]
    old_file: bytes
    new_file: bytes

    @classmethod
    def of_plain_torch(cls) -> "Expected":
        training = Training()
        old_file = safetensors.torch.save(training.module.state_dict())
        states, fingerprints = [], []
        for number in range(STEPS + 1):
            if number > 0:
                training.step(number - 1)
            buffer = io.BytesIO()
            torch.save(training.state(), buffer)
            states.append(buffer.getvalue())
            fingerprints.append(fingerprint(training.state()))
        return cls(states, fingerprints, old_file, safetensors.torch.save(training.tensors()))


@dataclass(frozen=True)
class Holdings:
    """What a process has of which nothing may be left."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> "Holdings":
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


class Disturbance:
    """What a harness does to the program; nothing by itself."""

    def enter(self, phase: str) -> None:
        """Called before the first try of each phase."""

    def leave(self) -> None:
        """Called when a phase has succeeded: what it did is looked at then, and that is not to be disturbed."""

    def end(self, error: Exception) -> str:
        """End the disturbance, after an error; returns what is known of it.

        Raises:
            DefectError: If there is no reason for an error.
        """
        raise DefectError(Verdict.UNTYPED, "an error without a disturbance") from error

    def may_raise(self, error: Exception) -> bool:
        """Whether an error that is not the package's own is what torch or Python raise of themselves."""
        return isinstance(error, OSError | MemoryError)


class PagedProgram:
    """One run of it. Pre: the folder is on a disk and empty, the process has one thread and no engine."""

    def __init__(self, folder: Path, io_engine: str, expected: Expected, disturbance: Disturbance) -> None:
        self._folder = folder
        self._expected = expected
        self._disturbance = disturbance
        self._report = Report()
        self._before = Holdings.now()
        self._training = Training()
        self._config = Config(
            ram=BUDGET,
            ssd=folder,
            min_paged_bytes=0,
            page_elements=4096,
            io_engine="threads" if io_engine == "threads" else "auto",
            report=folder / EXIT_REPORT,
        )
        session._C.Engine = functools.partial(session._C.Engine, retry_delays_ms=[0])  # type: ignore[misc]
        (folder / MODEL).write_bytes(expected.old_file)
        (folder / FIGURES).write_bytes(OLD_FIGURES)

    def run(self, report: Report) -> None:
        """Run all phases but the exit, which the caller has to make."""
        self._report = report
        self._before = Holdings.now()
        self._do("wrap", self._wrap, self._check_unwrapped)
        self._disturbance.enter("step")
        for number in range(STEPS):
            self._step(number)
        self._disturbance.leave()
        self._do("save", self._save, self._check_old_model)
        self._check_model()
        self._do("report", self._write_figures, self._check_old_figures)
        if not is_json(self._folder / FIGURES):
            raise DefectError(Verdict.WRONG, "half a report was written")
        self._do("close", self._unwrap, lambda: None)
        self._check_end()
        self._disturbance.enter("exit")

    # --- phases ----------------------------------------------------------------------------------------------------
    def _do(self, phase: str, act: Callable[[], None], check: Callable[[], None]) -> None:
        """Act until it does not raise; `check` what is there whenever it has."""
        self._disturbance.enter(phase)
        for _ in range(_MOST_TRIES):
            try:
                act()
                return self._disturbance.leave()
            except Exception as error:  # noqa: BLE001 (judged)
                self._judge(error, phase)
            check()
        raise DefectError(Verdict.STUCK, f"{phase} does not succeed once the fault is over")

    def _wrap(self) -> None:
        wrapped = torch_offload.wrap(self._training.module, config=self._config)
        if wrapped is not self._training.module:
            raise DefectError(Verdict.WRONG, "another module")

    def _check_unwrapped(self) -> None:
        self._expect(0, "after an error of wrap")
        if PROCESS.session is not None:
            raise DefectError(Verdict.LEAKED, "the engine is open after an error of the first wrap")

    def _step(self, number: int) -> None:
        for _ in range(_MOST_TRIES):
            try:
                return self._training.step(number)
            except Exception as error:  # noqa: BLE001 (judged)
                self._judge(error, f"step {number}")
            if self._is_stepped(number):
                return None
        raise DefectError(Verdict.STUCK, f"step {number} does not succeed once the fault is over")

    def _is_stepped(self, number: int) -> bool:
        """Whether a step that raised is whole; otherwise all is as before it."""
        told_of_the_rest()
        if self._told(lambda: is_saving_refused(self._training)):  # type: ignore[arg-type]
            if not self._training.step_began:
                raise DefectError(Verdict.STUCK, "saving is refused although no step was begun")
            self._note("loaded again")
            before = torch.load(io.BytesIO(self._expected.states[number]), weights_only=False)
            self._told(lambda: self._training.load(before))
            self._expect(number, "after loading")
            return False
        found = self._told(lambda: fingerprint(self._training.state()))
        if found not in self._expected.fingerprints[number : number + 2]:
            raise DefectError(Verdict.WRONG, f"neither before nor after step {number}, and not refused")
        return bool(found == self._expected.fingerprints[number + 1])

    def _save(self) -> None:
        safetensors.torch.save_file(self._training.tensors(), self._folder / MODEL)

    def _check_old_model(self) -> None:
        if (self._folder / MODEL).read_bytes() != self._expected.old_file:
            raise DefectError(Verdict.WRONG, "saving raised, and the old checkpoint is another one")

    def _check_model(self) -> None:
        if (self._folder / MODEL).read_bytes() != self._expected.new_file:
            raise DefectError(Verdict.WRONG, "the new checkpoint is not what plain torch saves")

    def _write_figures(self) -> None:
        torch_offload.report().write_json(self._folder / FIGURES)

    def _check_old_figures(self) -> None:
        if (self._folder / FIGURES).read_bytes() != OLD_FIGURES:
            raise DefectError(Verdict.WRONG, "writing a report raised, and the old one is another one")

    def _unwrap(self) -> None:
        torch_offload.unwrap(self._training.module)

    # --- judgements ------------------------------------------------------------------------------------------------
    def _judge(self, error: Exception, phase: str) -> None:
        """Note an error that the program may see, once what caused it is over."""
        if isinstance(error, DefectError):
            raise error
        known = self._disturbance.end(error)
        self._report.raised += 1
        self._report.verdict = Verdict.TYPED
        self._note(f"{phase}: {type(error).__name__}: {error}; {known}")
        message = str(error)
        if isinstance(error, OffloadError):
            if len(message) < _LEAST_MESSAGE or "unknown" in message.lower():
                raise DefectError(Verdict.UNTYPED, f"a message that says nothing: {message!r}") from error
        elif not self._disturbance.may_raise(error):
            raise DefectError(Verdict.UNTYPED, f"{phase} raised {type(error).__name__}") from error

    def _told(self, act: Callable[[], Any]) -> Any:
        """Return what `act` does, which may be told first of writes that failed before: of each, once."""
        for _ in range(_MOST_TRIES):
            try:
                return act()
            except TierIOError as error:
                if "nothing is lost" not in str(error) or not self._report.raised:
                    raise
                self._report.raised += 1
                self._note(f"told later: {error}")
        raise DefectError(Verdict.STUCK, "errors of earlier writes do not end")

    def _expect(self, number: int, when: str) -> None:
        if self._told(lambda: fingerprint(self._training.state())) != self._expected.fingerprints[number]:
            raise DefectError(Verdict.WRONG, f"not what plain torch has after {number} steps, {when}")

    def _check_end(self) -> None:
        """Everything is exact and ordinary again, and nothing is left."""
        self._expect(STEPS, "at the end")
        if PROCESS.session is not None:
            raise DefectError(Verdict.LEAKED, "the engine is open after the last unwrap")
        del self._training
        gc.collect()
        end = time.monotonic() + _SETTLING_SECONDS
        while (now := Holdings.now()) != self._before:
            if time.monotonic() > end:
                raise DefectError(Verdict.LEAKED, f"{now} instead of {self._before}")
            time.sleep(0.005)

    def _note(self, text: str) -> None:
        self._report.text += f"{text}\n"


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def check_folder(folder: Path, report: Report, *, may_lack_report: bool, may_leave: bool) -> None:
    """Judge what the process has left when it has ended."""
    files = {path.name for path in folder.iterdir()}
    if files - FILES and not may_leave:
        report.verdict = Verdict.LEAKED
        report.text += f"left: {', '.join(sorted(files - FILES))}\n"
    elif EXIT_REPORT in files:
        if not is_json(folder / EXIT_REPORT):
            report.verdict = Verdict.WRONG
            report.text += "half a report was written at the exit\n"
    elif may_lack_report:
        report.verdict = Verdict.TYPED  # the log says it
    else:
        report.verdict = Verdict.WRONG
        report.text += "no report was written at the exit\n"
