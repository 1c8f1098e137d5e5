"""The search for DeepSpeed's settings, over workers that answer what they are told to."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness import deepspeed_search
from harness.deepspeed_setup import CHANGES, START
from harness.worker_process import WorkerFailed

pytestmark = pytest.mark.any_torch

QUIET, BUSY = 0.01, 0.4


class FakeWorker:
    """Answers every step alike."""

    def __init__(self, seconds: float, peak_bytes: float, other_share: float = QUIET) -> None:
        self.answer = {"seconds": seconds, "other_share": other_share}
        self.peak_resident_bytes = peak_bytes
        self.is_closed = False

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> dict[str, Any]:
        return dict(self.answer)

    def close(self) -> None:
        self.is_closed = True


def row(seconds: float, peak_bytes: float, *, quiet: bool = True) -> dict[str, Any]:
    return {"settings": {"of": (seconds, peak_bytes)}, "seconds": seconds, "peak_resident_bytes": peak_bytes} | {
        "quiet": quiet
    }


def test_a_try_beside_others_is_repeated_until_it_is_quiet():
    """The quiet third attempt counts, those before are kept, and every worker was closed."""
    workers = [FakeWorker(15, 3e9, BUSY), FakeWorker(12, 3e9, BUSY), FakeWorker(8, 3e9), FakeWorker(7, 3e9)]
    given = iter(workers)
    found = deepspeed_search.attempt(lambda _: next(given), START)
    assert (found["seconds"], found["quiet"]) == (8, True)
    assert [one["seconds"] for one in found["attempts_before"]] == [15, 12]
    assert [worker.is_closed for worker in workers] == [True, True, True, False]


def test_repeating_ends():
    """On a machine that is never quiet the last attempt is taken and says that it was not."""
    begun = []

    def start(settings: dict[str, Any]) -> FakeWorker:
        begun.append(settings)
        return FakeWorker(9, 3e9, BUSY)

    found = deepspeed_search.attempt(start, START)
    assert len(begun) == deepspeed_search.MOST_ATTEMPTS
    assert found["quiet"] is False


def test_a_try_that_was_not_quiet_beats_none_that_was():
    """Method: all changes but the first run beside others, twice as fast. The search keeps what was quiet."""

    def start(settings: dict[str, Any]) -> FakeWorker:
        if settings == START:
            return FakeWorker(10, 3e9)
        is_first = settings == {**START, **CHANGES[0]}
        return FakeWorker(9, 4e9) if is_first else FakeWorker(5, 4e9, BUSY)

    tried = deepspeed_search.search(start)
    assert deepspeed_search.quiet_tries(tried)[0]["settings"] == {**START, **CHANGES[0]}
    assert [found["quiet"] for found in tried] == [True, True] + [False] * (len(tried) - 2)


def test_settings_that_fail_are_kept_and_not_repeated():
    """Every change fails: the search ends with the start, and says what happened to the others."""

    def start(settings: dict[str, Any]) -> FakeWorker:
        if settings != START:
            raise WorkerFailed("a bare assert")
        return FakeWorker(10, 3e9)

    tried = deepspeed_search.search(start)
    assert [found.get("failure") for found in tried[1:]] == ["a bare assert"] * (len(tried) - 1)
    assert deepspeed_search.fastest(tried, lambda *_: start(START), most_bytes=4e9)["settings"] == START


def test_settings_that_leave_no_room_for_the_other_rows_are_not_the_row():
    """The fastest takes more than there is: the next two take turns; where none fits, the run ends and says so."""
    tried = [row(4, 12e9), row(6, 6e9), row(9, 4e9)]
    found = deepspeed_search.fastest(tried, lambda settings, _: FakeWorker(settings["of"][0], 6e9), most_bytes=7e9)
    assert found["settings"] == {"of": (6, 6e9)}
    with pytest.raises(SystemExit, match="take 3e\\+09 bytes or less"):
        deepspeed_search.fastest(tried, lambda *_: FakeWorker(1, 1), most_bytes=3e9)


def test_only_what_is_neither_slower_nor_larger_is_left():
    """Of five tries one is dominated and one was not quiet."""
    tried = [row(10, 3e9), row(8, 4e9), row(9, 5e9), row(6, 6e9), row(5, 2e9, quiet=False)]
    assert [found["seconds"] for found in deepspeed_search.not_dominated(tried)] == [6, 8, 10]


def test_of_the_two_fastest_the_one_that_wins_in_turns_is_taken():
    """What was faster when tried alone is slower beside the other."""
    tried = [row(6, 6e9), row(6.2, 5e9), row(9, 4e9)]
    seconds = {(6, 6e9): 7.0, (6.2, 5e9): 6.1}
    found = deepspeed_search.fastest(
        tried, lambda settings, _: FakeWorker(seconds[settings["of"]], 6e9), most_bytes=7e9
    )
    assert found["settings"] == {"of": (6.2, 5e9)}
    assert len(found["rounds"]) == deepspeed_search.FINAL_ROUNDS
