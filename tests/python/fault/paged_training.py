"""The training of the harnesses: small, paged, in a process that is watched; and the bits that it has to come to.

Everything here that a case's process changes (its streams, its handlers of signals) it changes for itself.
"""

import hashlib
import io
import mmap
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by every optimizer: here once instead of in every case
from support.bits import fingerprint
from support.failing_steps import OPTIMIZERS, WIDTH, Run, is_saving_refused, told_of_the_rest

import torch_offload
from fault.case_runner import DefectError, Verdict
from torch_offload import Config

BUDGET_BYTES = 512 << 10  # a third of the state
TOLD_BYTES = 3000
PATIENCE_SECONDS = 20.0


class Progress:
    """What the process of a case and the harness tell each other, in memory that both have."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def ticks(self) -> int:
        """How often the case has come from one part of its training to the next."""
        return self._number(0)

    def tick(self) -> None:
        struct.pack_into("q", self._memory, 0, self.ticks + 1)

    @property
    def is_over(self) -> bool:
        """Whether the fault has passed."""
        return bool(self._number(1))

    def end(self) -> None:
        struct.pack_into("q", self._memory, 8, 1)

    def await_ticks(self, count: int) -> None:
        """Return at once when the case has made so many."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.ticks < count:
            if time.monotonic() > deadline:
                raise DefectError(Verdict.STUCK, f"the case made {self.ticks} of {count} ticks")
            time.sleep(0.0002)

    def _number(self, index: int) -> int:
        number: int = struct.unpack_from("q", self._memory, 8 * index)[0]
        return number


class Training(Run):
    """Six layers that train by steps, telling where they are; in memory without a configuration."""

    def __init__(
        self, optimizer: str, config: Config | None, progress: Progress | None = None, *, width: int = WIDTH
    ) -> None:
        self._progress = progress or Progress()
        self._progress.tick()
        super().__init__(OPTIMIZERS[optimizer], config, width=width)
        self._progress.tick()

    def step(self, number: int, inputs: torch.Tensor | None = None, between: Callable[[], None] | None = None) -> None:
        """Train on a batch that follows from the number, or on the same one that somebody else has made.

        `between` is called after the forward, after the backward and after the step.
        """
        self.step_began = False
        self.optimizer.zero_grad()
        loss = self.module(batch(number, self.width) if inputs is None else inputs).square().mean()
        self._part_has_ended(between)
        loss.backward()
        self._part_has_ended(between)
        self.step_began = True
        self.optimizer.step()
        self._part_has_ended(between)

    def bits(self) -> str:
        """Return a digest of everything that training goes on with."""
        return hashlib.sha256(repr(fingerprint(self.state())).encode()).hexdigest()

    def _part_has_ended(self, between: Callable[[], None] | None) -> None:
        self._progress.tick()
        if between is not None:
            between()


class Plain:
    """What the training comes to in memory: after no step, after one, and so on.

    `states` are what checkpoints would hold, of the first steps.
    """

    def __init__(self, optimizer: str, steps: int, *, saved_states: int = 0, width: int = WIDTH) -> None:
        self.bits: list[str]
        self.states: list[bytes]
        self.bits, self.states = in_child(lambda: _train_in_memory(optimizer, steps, saved_states, width))

    def check(self, training: Training, steps: int, when: str = "in the end") -> None:
        if training.bits() != self.bits[steps]:
            raise DefectError(Verdict.WRONG, f"{when}, after {steps} steps: not the bits of training in memory")

    def judge(self, training: Training, number: int, error: BaseException) -> str:
        """Say what a step ended in that raised, as support/failing_steps.py does, and go on to the same bits."""
        told_of_the_rest()
        if is_saving_refused(training):
            if not training.step_began:
                raise DefectError(Verdict.UNTYPED, "saving is refused although no step was left half-way") from error
            training.load(torch.load(io.BytesIO(self.states[number]), weights_only=False))
            outcome = "refused"
        else:
            found = training.bits()
            if found not in self.bits[number : number + 2]:
                raise DefectError(Verdict.WRONG, "neither before nor after the step, and saved") from error
            outcome = "before" if found == self.bits[number] else "after"
        if outcome != "after":
            training.step(number)
        for later in range(number + 1, number + 3):
            training.step(later)
        self.check(training, number + 3, f"{outcome} an error in step {number}")
        return outcome


def batch(number: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(number))


def config_for(scratch: Path, **settings: Any) -> Config:
    """Pages of 16 KiB, and memory for a third of the state."""
    options = {"ram": BUDGET_BYTES, "min_paged_bytes": 0, "page_elements": 4096} | settings
    return Config(ssd=scratch, **options)


def check_paged() -> None:
    """A page was written and one was read, and memory kept to the budget."""
    report = torch_offload.report()
    if report.ssd_written_bytes == 0 or report.ssd_read_bytes == 0:
        raise DefectError(Verdict.UNTYPED, "nothing was paged: the case shows nothing")
    if report.host_peak_bytes > report.budget_bytes:
        raise DefectError(Verdict.WRONG, f"{report.host_peak_bytes} bytes in memory, {report.budget_bytes} allowed")


@contextmanager
def case_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder for one case, with one for pages in it. The case's process leaves by SystemExit, and leaves it there."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '_')}_", dir=parent))
    (folder / "scratch").mkdir()
    harness = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == harness:
            shutil.rmtree(folder)


def begin_case(folder: Path) -> None:
    """Have this process be as a program that a user starts: what it says goes to a file, signals have their defaults.

    A harness may have been started in the background, where SIGINT is ignored.
    """
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(told, sys.stdout.fileno())
    os.dup2(told, sys.stderr.fileno())
    os.close(told)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)


def told_by(folder: Path) -> str:
    """Return what the case wrote to its streams so far."""
    path = folder / "told"
    return path.read_text(errors="replace") if path.exists() else ""


def in_child(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own: no thread that it starts stays in the harness."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(sending, "wb") as pipe:
                pickle.dump(function(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        answer = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("what a harness needs before its cases could not be had")
    return pickle.loads(answer)


def seeded_chance() -> random.Random:
    """Return what draws the cases of this commit."""
    return random.Random(int(os.environ.get("OFFLOAD_TEST_SEED") or "0", 16))


def is_full() -> bool:
    return os.environ.get("MATRIX") == "full"


def _train_in_memory(optimizer: str, steps: int, saved_states: int, width: int) -> tuple[list[str], list[bytes]]:
    torch.set_num_threads(1)
    training = Training(optimizer, None, width=width)
    bits, states = [], []
    for number in range(steps + 1):
        bits.append(training.bits())
        if number < saved_states:
            buffer = io.BytesIO()
            torch.save(training.state(), buffer)
            states.append(buffer.getvalue())
        if number < steps:
            training.step(number)
    return bits, states
