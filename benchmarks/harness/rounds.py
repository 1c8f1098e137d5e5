"""Variants that take turns, so that all of them meet the same hours of a machine that others may share."""

from collections.abc import Callable, Mapping
from typing import Any

from harness.disk import DiskProbe
from harness.reporting import are_enough, is_quiet, progress
from harness.worker_process import SteppingWorker

Round = dict[str, Any]
Turn = Callable[[], dict[str, Any]]


def take_turns(turns: Mapping[str, Turn], *, wanted: int, most: int, probe: DiskProbe | None = None) -> list[Round]:
    """Let each variant have its turn, round after round, until enough rounds were quiet; each is first in turn.

    Args:
        turns: Each returns what it measured, `CpuSeconds.since` included.
        wanted: Quiet rounds.
        most: Rounds, quiet or not.
        probe: Measures the raw disk before each round.

    Returns:
        Of every round `quiet`, `steps` by variant and, with a probe, `disk`.
    """
    names = list(turns)
    rounds: list[Round] = []
    while not are_enough(rounds, wanted=wanted, most=most):
        first = len(rounds) % len(names)
        disk = {} if probe is None else {"disk": probe.bandwidth()}
        steps = {name: turns[name]() for name in names[first:] + names[:first]}
        quiet = all(is_quiet(step) for step in steps.values())
        rounds.append({"quiet": quiet, "steps": steps} | disk)
        progress(f"{ {name: round(step['seconds'], 2) for name, step in steps.items()} } {quiet=}")
    return rounds


class Workers(dict[str, SteppingWorker]):
    """The process of each variant; all end with the context."""

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.values():
            worker.close()

    def warm_up(self, steps: int) -> None:
        for worker in self.values():
            worker.warm_up(steps)

    def take_turns(self, *, wanted: int, most: int, probe: DiskProbe | None = None) -> list[Round]:
        """Let each process step in turn, as `take_turns` does."""
        turns = {name: worker.step for name, worker in self.items()}
        return take_turns(turns, wanted=wanted, most=most, probe=probe)

    def finish(self) -> dict[str, dict[str, Any]]:
        return {name: worker.ask("finish") for name, worker in self.items()}
