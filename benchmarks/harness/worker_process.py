"""A worker process that takes commands on stdin and answers each with a JSON line: both ends, and its log."""

import contextlib
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL_LINES = 15
BENCHMARKS = Path(__file__).resolve().parents[1]


def worker_command(name: str, *, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of workers/, from any directory."""
    search_path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ["env", f"PYTHONPATH={search_path}", python, "-m", f"workers.{name}"]


def tree_command(name: str, tree: Path) -> list[str]:
    """Return the command that runs a module of this tree's workers/ over the package of another tree."""
    search_path = os.pathsep.join([str(BENCHMARKS), str(tree)])
    return ["env", f"PYTHONPATH={search_path}", "PYTHONSAFEPATH=1", sys.executable, "-m", f"workers.{name}"]


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Return options of a command: `budget_bytes` is --budget-bytes."""
    return [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]


class WorkerFailed(RuntimeError):
    """The process ended instead of answering; the message has the last lines of its log."""


class SteppingWorker(ABC):
    """What takes steps on request, and has taken so much memory: one process, or several as one.

    Attributes:
        process: The only one, or the first.
        description: What it said of itself when it had started.
    """

    process: "subprocess.Popen[str]"
    description: dict[str, Any]

    def __init__(self, name: str) -> None:
        self.name = name
        self.peak_resident_bytes = 0.0

    @abstractmethod
    def ask(self, command: str) -> dict[str, Any]:
        """Return what it answers."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> dict[str, Any]:
        answer = self.ask("step")
        self.peak_resident_bytes = max(self.peak_resident_bytes, answer["peak_resident_bytes"])
        return answer


class WorkerProcess(SteppingWorker):
    """Speaks with a process that does `serve`."""

    def __init__(self, name: str, command: Sequence[str], *, log_directory: str, **environment: str) -> None:
        super().__init__(name)
        self.log = Path(log_directory, f"{name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, **environment},
            )
        self.description = self._answer()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: str) -> dict[str, Any]:
        if self.process.stdin is None:
            raise WorkerFailed(f"{self.name} has no stdin")
        try:
            self.process.stdin.write(command + "\n")
        except BrokenPipeError:
            self._fail()
        return self._answer()

    def close(self) -> None:
        """End the process and wait for it; safe to call twice, and for one that failed."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a command that the process did not live to read
                    stream.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            self._fail()
        return dict(json.loads(line))

    def _fail(self) -> None:
        self.close()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise WorkerFailed(f"{self.name} ended with status {self.process.returncode}:\n{tail}")


def serve(make_worker: Callable[[], Any]) -> None:
    """Make a worker and answer commands, the names of its methods, until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints must not look like an answer
    settle_vector_math()
    worker = make_worker()
    answers.write(json.dumps(worker.describe()) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(getattr(worker, line.strip())()) + "\n")


def settle_vector_math() -> None:
    """Call torch's functions of positions on one thread before others do; the package's function of this name, which
    workers in memory do not import, says why.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        for function in (torch.cos, torch.sin):
            function(torch.ones(1))
