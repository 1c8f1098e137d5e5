"""The sweep that a search is held against, over workers that answer what they are told to; and parts of it kept."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import search
from harness.reporting import at_most
from harness.worker_process import WorkerFailed

pytestmark = pytest.mark.any_torch

SETUP = argparse.Namespace(rows=1, accumulation=8, activations="page", checkpointing=False)


class FakeWorker:
    """Each step takes a second longer than the one before; the first may run out of memory."""

    def __init__(self, seconds: float, failure: str = "") -> None:
        self.steps, self.seconds, self.failure = 0, seconds, failure

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> dict[str, Any]:
        if self.failure:
            raise WorkerFailed(self.failure)
        self.steps += 1
        return {"seconds": self.seconds + self.steps, "ssd_read_bytes": 1, "ssd_written_bytes": 2, "loss": 0.0}


@pytest.mark.parametrize(
    ("enough_seconds", "steps", "seconds"), [(10.0, 5, 4 + 4), (5.0, 5, 4 + 4), (4.9, 1, 4 + 1), (0.0, 1, 4 + 1)]
)
def test_what_is_clearly_slower_makes_one_step(monkeypatch, enough_seconds, steps, seconds):
    """Two to warm up and the median of three, or only the first of them."""
    worker = FakeWorker(seconds=4)
    monkeypatch.setattr(search, "worker_of", lambda *_: worker)
    found = search.swept(search.Plan(warmup=2, steps=3), search.Plan().adapters, "", SETUP, enough_seconds)
    assert (worker.steps, found["seconds"], found["fits"]) == (steps, seconds, True)


def test_memory_that_runs_out_is_an_answer_and_nothing_else_is(monkeypatch):
    monkeypatch.setattr(search, "worker_of", lambda *_: FakeWorker(1, "OutOfTierMemory: 4 more bytes"))
    assert search.swept(search.Plan(), search.Plan().adapters, "", SETUP, 1) == {"fits": False}
    monkeypatch.setattr(search, "worker_of", lambda *_: FakeWorker(1, "KeyError"))
    with pytest.raises(WorkerFailed):
        search.swept(search.Plan(), search.Plan().adapters, "", SETUP, 1)


def test_a_problem_is_solved_once_for_a_commit(monkeypatch, tmp_path):
    """Method: solve twice, among fewer problems, another problem, another commit, with a modified file, and without a
    folder."""
    solved = []
    code = {"commit": "a", "torch": "b", "modified_files": [], "date": "today"}

    def solve(_plan: object, problem: search.Problem, *_: object) -> dict[str, Any]:
        solved.append(problem.name)
        return {"chosen": (1, 8), "number": len(solved)}

    def ask(problem: search.Problem, folder: Path | None) -> dict[str, Any]:
        return search.kept(plan, problem, str(tmp_path), None, folder)

    monkeypatch.setattr(search, "solve", solve)
    monkeypatch.setattr(search, "code", lambda: code)
    plan = search.Plan()
    first, second = plan.problems[:2]
    folder = tmp_path / "kept"
    assert ask(first, folder) == ask(first, folder) == {"chosen": [1, 8], "number": 1, "date": "today"}
    plan = search.Plan(only=("200",))
    assert ask(first, folder)["number"] == 1
    assert ask(second, folder)["number"] == 2
    code["commit"] = "c"
    assert ask(first, folder)["number"] == 3
    code["modified_files"] = ["benchmarks/search.py"]
    with pytest.raises(SystemExit, match=r"modified: benchmarks/search\.py"):
        ask(first, folder)
    assert ask(first, None)["number"] == 4
    assert solved == [first.name, second.name, first.name, first.name]


def test_a_share_that_was_not_measured_meets_no_bar():
    assert search.worst_of([0.1, 0.3, 0.2]) == 0.3
    assert not at_most("bytes", search.worst_of([0.1, math.nan]), 0.5)["holds"]
