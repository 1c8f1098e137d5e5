"""Signals at random moments of a paged training: the right status, nothing left, and exact where it goes on.

    python -m fault.signals RECORD.json

Moments are drawn from OFFLOAD_TEST_SEED, counted in parts of the training and some milliseconds behind them; those of
an interrupt that the program catches also in lines of Python, so that it comes between any two of them. MATRIX=full
tries a thousand.
"""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fault.case_runner import Beside, CaseRunner, Child, DefectError, Report, Verdict
from fault.paged_training import (
    TOLD_BYTES,
    Plain,
    Progress,
    Training,
    batch,
    begin_case,
    case_folder,
    check_paged,
    config_for,
    in_child,
    is_full,
    seeded_chance,
    told_by,
)
from torch_offload.cli import app
from torch_offload.reporting.report import Report as EngineReport

LEAST = 40
FULL_CASES = 1000
STEPS = 12
MOST_STEPS = 40
PARTS = 3  # of a step
LATEST_TICK = PARTS * STEPS // 2
LONGEST_DELAY_SECONDS = 0.015  # some more than a step takes
INTERRUPTED_STEPS = 5
HANDLER_STATUS = 77
OPTIMIZERS = ("fused", "foreach", "single")
SCRIPT = "import sys; sys.modules['fault.scene'].train_without_end()"


@dataclass
class Scene:
    """One case: where it lies, when its signals come, and what training comes to."""

    folder: Path
    chance: random.Random
    plain: dict[str, Plain]
    lines: dict[str, int]  # of Python in a step, by optimizer
    optimizer: str
    progress: Progress = field(default_factory=Progress)

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    @property
    def report_path(self) -> Path:
        return self.folder / "report.json"

    def begin(self, **settings: Any) -> Training:
        """Be the program of the case."""
        begin_case(self.folder)
        return Training(self.optimizer, config_for(self.scratch, **settings), self.progress)

    def train_without_end(self, training: Training | None = None) -> None:
        """Train until a signal ends the program."""
        training = training or Training(self.optimizer, None, self.progress)
        number = 0
        while True:
            training.step(number)
            number += 1

    def go_on(self, training: Training, step: Callable[[int], None] | None = None) -> None:
        """Train for some steps, and for as many more as it takes until the signals have come; then compare."""
        number = 0
        while number < STEPS or not (self.progress.is_over or number == MOST_STEPS):
            (step or training.step)(number)
            number += 1
        check_paged()
        self.plain[self.optimizer].check(training, number)

    def await_moment(self) -> None:
        self.progress.await_ticks(self.chance.randint(1, LATEST_TICK))
        time.sleep(self.chance.uniform(0, LONGEST_DELAY_SECONDS))

    def check_left(self, child: Child, report: Report, *, is_reported: bool | None) -> None:
        """Nothing lies in the directory of pages; a report is whole, and there if it has to be.

        `is_reported`: whether it has to be; None: it may be.
        """
        if not child.wait(60):
            return  # which the runner says
        report.text += f"told:\n{told_by(self.folder)[-TOLD_BYTES:]}\n"
        if left := [path.name for path in self.scratch.iterdir()]:
            raise DefectError(Verdict.LEAKED, f"left in the directory of pages: {left}")
        if left := [path.name for path in self.folder.iterdir() if path.name.startswith("report.json.")]:
            raise DefectError(Verdict.LEAKED, f"left of a report: {left}")
        if self.report_path.exists():
            EngineReport.read_json(self.report_path)
        if is_reported is not None and is_reported != self.report_path.exists():
            raise DefectError(Verdict.UNTYPED, f"a report: {self.report_path.exists()}")


def sending(scene: Scene, *numbers: signal.Signals, is_reported: bool | None = False) -> Beside:
    """Send signals, the first at a random moment and each soon after the one before; then look at what is left."""

    def send(child: Child, report: Report) -> None:
        scene.await_moment()
        has_begun = scene.progress.ticks >= 2  # before, there may be nothing to report
        for number in numbers:
            child.send(number)
            report.injected += 1
            time.sleep(scene.chance.uniform(0, LONGEST_DELAY_SECONDS))
        scene.progress.end()
        scene.check_left(child, report, is_reported=is_reported if has_begun or not is_reported else None)

    return send


# --- A signal that ends the program ---------------------------------------------------------------------------------


def ended_by(number: signal.Signals, *, times: int = 1) -> Callable[[CaseRunner, str, Scene], None]:
    """The default of the signal: the status that Python ends with. After an interrupt the report is written."""

    def case(runner: CaseRunner, name: str, scene: Scene) -> None:
        is_reported = {signal.SIGINT: True if times == 1 else None}.get(number, False)
        beside = sending(scene, *[number] * times, is_reported=is_reported)

        def train(report: Report) -> None:
            scene.train_without_end(scene.begin(report=scene.report_path))

        runner.run(name, train, beside=beside, ends=-number)

    return case


def ended_by_handler(*, times: int = 1) -> Callable[[CaseRunner, str, Scene], None]:
    """A handler of SIGTERM that raises, as programs have it. One that comes while Python ends may kill it."""

    def case(runner: CaseRunner, name: str, scene: Scene) -> None:
        def train(report: Report) -> None:
            training = scene.begin(report=scene.report_path)
            signal.signal(signal.SIGTERM, _exit_in_handler)
            scene.train_without_end(training)

        def send(child: Child, report: Report) -> None:
            scene.progress.await_ticks(3)  # the handler is there
            sending(scene, *[signal.SIGTERM] * times, is_reported=True if times == 1 else None)(child, report)

        ends = HANDLER_STATUS if times == 1 else (HANDLER_STATUS, -signal.SIGTERM)
        runner.run(name, train, beside=send, ends=ends)

    return case


def _exit_in_handler(number: int, frame: FrameType | None) -> None:
    raise SystemExit(HANDLER_STATUS)


def under_launcher(
    number: signal.Signals, *, times: int, ends: int | tuple[int, ...]
) -> Callable[[CaseRunner, str, Scene], None]:
    """What `torch-offload run` promises: the status, and a report unless the process was killed."""

    def case(runner: CaseRunner, name: str, scene: Scene) -> None:
        def launch(report: Report) -> None:
            sys.modules["fault.scene"] = scene  # type: ignore[assignment] # the script runs in this process
            begin_case(scene.folder)
            script = scene.folder / "script.py"
            script.write_text(SCRIPT)
            settings = f"--ram 512KiB --min-paged-bytes 0 --page-elements 4096 --ssd {scene.scratch}".split()
            sys.argv = ["torch-offload", "run", *settings, "--report", str(scene.report_path), str(script)]
            app.main()

        is_reported = None if times > 1 else number != signal.SIGHUP
        runner.run(name, launch, beside=sending(scene, *[number] * times, is_reported=is_reported), ends=ends)

    return case


def ended_with_its_workers(runner: CaseRunner, name: str, scene: Scene) -> None:
    """Ctrl-C of a terminal goes to the workers of a data loader too; none of them is left."""

    def train(report: Report) -> None:
        os.setpgid(0, 0)
        training = scene.begin(report=scene.report_path)
        for number, inputs in enumerate(loader(MOST_STEPS)):
            training.step(number, inputs)
        time.sleep(60)

    def send(child: Child, report: Report) -> None:
        scene.progress.await_ticks(3)  # the workers run
        scene.await_moment()
        os.killpg(child.pid, signal.SIGINT)
        report.injected += 1
        scene.check_left(child, report, is_reported=True)
        deadline = time.monotonic() + 10
        while _is_group(child.pid):
            if time.monotonic() > deadline:
                os.killpg(child.pid, signal.SIGKILL)
                raise DefectError(Verdict.LEAKED, "a worker is left")
            time.sleep(0.01)

    runner.run(name, train, beside=send, ends=-signal.SIGINT)


def _is_group(number: int) -> bool:
    """Whether such a group has a process that has not ended."""
    for entry in os.scandir("/proc"):
        with suppress(OSError, IndexError):
            state, _, group = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == number and state != "Z":
                return True
    return False


# --- A signal after which it goes on --------------------------------------------------------------------------------


def shown_on_demand(runner: CaseRunner, name: str, scene: Scene) -> None:
    """SIGUSR1 under the watchdog: what it shows is there, and training is exact."""

    def train(report: Report) -> None:
        training = scene.begin(watchdog=True)
        scene.go_on(training)
        deadline = time.monotonic() + 20
        while not all(words in told_by(scene.folder) for words in ("Current thread", "host tier:")):
            if time.monotonic() > deadline:
                raise DefectError(Verdict.STUCK, "nothing was shown")
            time.sleep(0.01)

    def send(child: Child, report: Report) -> None:
        scene.progress.await_ticks(3)  # the watchdog listens
        sending(scene, *[signal.SIGUSR1] * scene.chance.randint(1, 3))(child, report)

    runner.run(name, train, beside=send)


def stopped(runner: CaseRunner, name: str, scene: Scene) -> None:
    """SIGSTOP, then SIGCONT: exact, and the time between is nobody's fault, also where it exceeds the time limits."""
    is_long = scene.chance.random() < 0.25
    seconds = scene.chance.uniform(1.2, 5 if is_full() else 1.4) if is_long else scene.chance.uniform(0.2, 0.5)

    def train(report: Report) -> None:
        training = scene.begin(watchdog=True, io_timeout=1)
        scene.go_on(training)
        if "torch_offload" in told_by(scene.folder):
            raise DefectError(Verdict.UNTYPED, "the time in which it was stopped was told of")

    def stop(child: Child, report: Report) -> None:
        scene.await_moment()
        child.send(signal.SIGSTOP)
        time.sleep(seconds)
        child.send(signal.SIGCONT)
        report.injected += 1
        scene.progress.end()
        scene.check_left(child, report, is_reported=False)

    runner.run(name, train, beside=stop)


# --- Children -------------------------------------------------------------------------------------------------------


def with_children(runner: CaseRunner, name: str, scene: Scene) -> None:
    """Programs that are started from the training and from a thread beside it, and children that only end."""

    def train(report: Report) -> None:
        training = scene.begin()
        scene.progress.end()
        beside = threading.Thread(target=_start_programs, args=(report, STEPS))
        beside.start()
        starts = [lambda: _start_programs(report, 1), lambda: _fork(report)]
        chance = scene.chance

        def sometimes() -> None:
            if chance.random() < 0.3:
                chance.choice(starts)()

        scene.go_on(training, lambda number: training.step(number, between=sometimes))
        beside.join()

    def look(child: Child, report: Report) -> None:
        scene.check_left(child, report, is_reported=False)

    runner.run(name, train, beside=look)


def _start_programs(report: Report, count: int) -> None:
    for _ in range(count):
        subprocess.run(["true"], check=True)
        report.injected += 1


def _fork(report: Report) -> None:
    """A child that reads what it may and ends without a word, as those of some libraries do."""
    child = os.fork()
    if child == 0:
        os._exit(int(batch(0).shape[0]) - 8)
    report.injected += 1
    if os.waitpid(child, 0)[1] != 0:
        raise DefectError(Verdict.CRASHED, "a child that did nothing ended badly")


class Batches(Dataset[torch.Tensor]):
    """The batches of the training, one a step."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        return batch(number)


def loader(count: int) -> DataLoader[torch.Tensor]:
    """Two workers that are forked from the training."""
    return DataLoader(
        Batches(count), batch_size=None, num_workers=2, multiprocessing_context=multiprocessing.get_context("fork")
    )


def with_workers(runner: CaseRunner, name: str, scene: Scene) -> None:
    """Workers of a data loader, forked before the first step and again between steps."""

    def train(report: Report) -> None:
        training = scene.begin()
        batches = _batches(report)
        scene.progress.end()
        scene.go_on(training, lambda number: training.step(number, next(batches)))

    def look(child: Child, report: Report) -> None:
        scene.check_left(child, report, is_reported=False)

    runner.run(name, train, beside=look)


def _batches(report: Report) -> Iterator[torch.Tensor]:
    """The batches of all steps; of the workers' first half those of a second loader take over."""
    report.injected += 2
    half = STEPS // 2
    yield from (inputs for _, inputs in zip(range(half), loader(STEPS), strict=False))
    report.injected += 2
    yield from (inputs for number, inputs in enumerate(loader(STEPS)) if number >= half)


# --- An interrupt that the program catches --------------------------------------------------------------------------


class LineCounter:
    """Interrupts the program at a line of Python, of this package or of torch's optimizers."""

    def __init__(self, line: int = 0) -> None:
        self._line = line
        self.lines = 0

    def __enter__(self) -> "LineCounter":
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return self._see if "torch_offload/" in path or "torch/optim/" in path else None

    def _see(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                signal.raise_signal(signal.SIGINT)
        return self._see


def caught_at_a_line(runner: CaseRunner, name: str, scene: Scene) -> None:
    """An interrupt between two lines of a step, which the program catches."""

    def train(report: Report) -> None:
        training = scene.begin()
        number = scene.chance.randint(0, INTERRUPTED_STEPS - 1)
        for done in range(number):
            training.step(done)
        lines = LineCounter(scene.chance.randint(1, scene.lines[scene.optimizer]))
        try:
            with lines:
                training.step(number)
        except KeyboardInterrupt as interrupt:
            report.injected = 1
            report.text = (
                f"{scene.plain[scene.optimizer].judge(training, number, interrupt)} {_place(interrupt.__traceback__)}"
            )
        else:
            report.verdict = Verdict.UNREACHED

    runner.run(name, train)


def lines_of_a_step(optimizer: str, folder: Path) -> int:
    """Count them in a step that finds nothing new."""
    torch.set_num_threads(1)
    training = Training(optimizer, config_for(folder))
    for number in range(INTERRUPTED_STEPS):
        training.step(number)
    with LineCounter() as counter:
        training.step(INTERRUPTED_STEPS)
    return counter.lines


def caught_at_a_moment(runner: CaseRunner, name: str, scene: Scene) -> None:
    """An interrupt that comes from outside at any time, which the program catches around its loop."""

    def train(report: Report) -> None:
        training = scene.begin()
        number = 0
        try:
            while number < INTERRUPTED_STEPS:
                training.step(number)
                number += 1
            time.sleep(60)
        except KeyboardInterrupt as interrupt:
            if number == INTERRUPTED_STEPS:
                report.verdict = Verdict.UNREACHED
                return
            report.text = (
                f"{scene.plain[scene.optimizer].judge(training, number, interrupt)} {_place(interrupt.__traceback__)}"
            )

    def send(child: Child, report: Report) -> None:
        scene.progress.await_ticks(scene.chance.randint(2, 2 + PARTS * (INTERRUPTED_STEPS - 1)))
        time.sleep(scene.chance.uniform(0, LONGEST_DELAY_SECONDS / PARTS))
        child.send(signal.SIGINT)
        report.injected = 1
        scene.check_left(child, report, is_reported=False)

    runner.run(name, train, beside=send)


def judged(scene: Scene, training: Training, number: int, error: BaseException) -> str:
    return f"{scene.plain[scene.optimizer].judge(training, number, error)}, {_place(error.__traceback__)}"


def _place(trace: TracebackType | None) -> str:
    """The innermost line of a traceback, LineCounter's own left out."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name != "_see":
            place = f"{Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


# --- The harness ----------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[int, Callable[[CaseRunner, str, Scene], None]]] = {
    "interrupt": (3, ended_by(signal.SIGINT)),
    "two interrupts": (3, ended_by(signal.SIGINT, times=2)),
    "interrupt of all workers": (1, ended_with_its_workers),
    "terminate": (2, ended_by(signal.SIGTERM)),
    "two terminates": (1, ended_by(signal.SIGTERM, times=2)),
    "terminate handler": (3, ended_by_handler()),
    "terminate handler, twice": (3, ended_by_handler(times=2)),
    "hang up": (2, ended_by(signal.SIGHUP)),
    "user signal, no watchdog": (1, ended_by(signal.SIGUSR1)),
    "launcher, interrupt": (2, under_launcher(signal.SIGINT, times=1, ends=130)),
    "launcher, two interrupts": (2, under_launcher(signal.SIGINT, times=2, ends=(130, -signal.SIGINT))),
    "launcher, terminate": (2, under_launcher(signal.SIGTERM, times=1, ends=143)),
    "launcher, two terminates": (2, under_launcher(signal.SIGTERM, times=2, ends=(143, -signal.SIGTERM))),
    "launcher, hang up": (1, under_launcher(signal.SIGHUP, times=1, ends=-signal.SIGHUP)),
    "shown on demand": (3, shown_on_demand),
    "stopped": (4, stopped),
    "children": (2, with_children),
    "workers": (2, with_workers),
    "caught at a moment": (6, caught_at_a_moment),
    "caught at a line": (14, caught_at_a_line),
}
"""Each with how many cases a round has."""


def main(record: Path) -> None:
    runner = CaseRunner()
    chance = seeded_chance()
    plain = {name: Plain(name, MOST_STEPS, saved_states=INTERRUPTED_STEPS) for name in OPTIMIZERS}
    with case_folder(record.parent, "lines") as folder:
        lines = {name: in_child(partial(lines_of_a_step, name, folder / "scratch")) for name in OPTIMIZERS}
    counted = sum(count for count, _ in KINDS.values())
    for turn in range(FULL_CASES // counted + 1 if is_full() else 1):
        for kind, (count, case) in KINDS.items():
            for number in range(count):
                drawn, optimizer = random.Random(chance.random()), chance.choice(OPTIMIZERS)
                with case_folder(record.parent, kind) as folder:
                    case(runner, f"{kind} {turn}.{number}", Scene(folder, drawn, plain, lines, optimizer))
    runner.finish(record, least=LEAST)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
