"""The search for DeepSpeed's settings, in which only what was measured on a quiet machine counts.

A try that is not quiet is repeated, up to a limit. The two fastest settings then take turns, since one try after the
other says little about a difference of a few percent. Fewer buffers are slower and take less memory: what was tried is
summed up as the settings of which no other one is both faster and smaller.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from harness.deepspeed_setup import CHANGES, START
from harness.reporting import is_quiet, progress, spread, usable
from harness.rounds import Workers
from harness.worker_process import SteppingWorker, WorkerFailed

WARMUP_STEPS = 1
MEASURED_STEPS = 3
MOST_ATTEMPTS = 3
FINAL_ROUNDS = 3
MOST_FINAL_ROUNDS = 6

Settings = dict[str, Any]
Try = dict[str, Any]
Start = Callable[[Settings], SteppingWorker]


def search(start: Start) -> list[Try]:
    """Return all settings that were tried, those that failed included."""
    tried = [attempt(start, START)]
    best = tried[0]
    for change in CHANGES:
        settings = {**best["settings"], **change}
        if any(row["settings"] == settings for row in tried):
            continue
        tried.append(attempt(start, settings))
        if counts(tried[-1]) and (not counts(best) or tried[-1]["seconds"] < best["seconds"]):
            best = tried[-1]
    if not any("seconds" in row for row in tried):
        raise SystemExit(f"DeepSpeed took no step with any settings: {json.dumps(tried, indent=1)}")
    return tried


def counts(row: Try) -> bool:
    """Whether it took steps, and others left the machine alone meanwhile."""
    return bool(row.get("quiet"))


def attempt(start: Start, settings: Settings) -> Try:
    """Try some settings until a try was quiet or failed; all attempts are kept, the last one counts."""
    attempts = []
    while len(attempts) < MOST_ATTEMPTS:
        attempts.append(_take_steps(start, settings))
        if attempts[-1].get("quiet", True):
            break
    row = {"settings": settings, **attempts[-1], "attempts_before": attempts[:-1]}
    progress(json.dumps(row)[:300])
    return row


def _take_steps(start: Start, settings: Settings) -> dict[str, Any]:
    worker = None
    try:
        worker = start(settings)
        steps = [worker.step() for _ in range(WARMUP_STEPS + MEASURED_STEPS)][WARMUP_STEPS:]
        return {
            "seconds": statistics.median(step["seconds"] for step in steps),
            "other_share": [step["other_share"] for step in steps],
            "quiet": all(is_quiet(step) for step in steps),
            "peak_resident_bytes": worker.peak_resident_bytes,
        }
    except WorkerFailed as failure:
        return {"failure": str(failure)}
    finally:
        if worker is not None:
            worker.close()


def quiet_tries(tried: Sequence[Try]) -> list[Try]:
    """Return what counts, the fastest first; where no try was quiet, all that took steps."""
    taken = [row for row in tried if "seconds" in row]
    return sorted([row for row in taken if counts(row)] or taken, key=lambda row: float(row["seconds"]))


def not_dominated(tried: Sequence[Try]) -> list[Try]:
    """Return the tries of which no other one is as fast with less memory; the fastest first."""
    front: list[Try] = []
    for row in quiet_tries(tried):
        if not front or row["peak_resident_bytes"] < front[-1]["peak_resident_bytes"]:
            front.append(row)
    return front


def fastest(
    tried: Sequence[Try], start_named: Callable[[Settings, str], SteppingWorker], *, most_bytes: float
) -> dict[str, Any]:
    """Let the two fastest settings take turns; return the `settings` that win and the `rounds` that say so.

    Settings whose process takes more than `most_bytes` are left out: the other rows would not fit beside it.
    """
    two = [row for row in quiet_tries(tried) if row["peak_resident_bytes"] <= most_bytes][:2]
    if not two:
        raise SystemExit(f"no settings of DeepSpeed that were tried take {most_bytes:.3g} bytes or less")
    if len(two) == 1:
        return {"settings": two[0]["settings"], "rounds": []}
    names = {f"deepspeed_{place}": row["settings"] for place, row in zip(("first", "second"), two, strict=True)}
    with Workers() as workers:
        for name, settings in names.items():
            workers[name] = start_named(settings, name)
            workers[name].warm_up(WARMUP_STEPS)
        rounds = workers.take_turns(wanted=FINAL_ROUNDS, most=MOST_FINAL_ROUNDS)
    used, _ = usable(rounds, wanted=FINAL_ROUNDS)
    seconds = {name: spread([row["steps"][name]["seconds"] for row in used]) for name in names}
    winner = min(names, key=lambda name: seconds[name]["median"])
    return {"settings": names[winner], "seconds": seconds, "rounds": rounds}
