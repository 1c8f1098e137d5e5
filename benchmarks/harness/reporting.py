"""What every benchmark does with its rounds: which count, how they are summed up, what must hold."""

import json
import math
import statistics
import sys
from typing import Any

from harness import provenance

MAX_OTHER_SHARE = 0.10  # of the machine's CPU seconds, taken by others while something was measured
MIN_QUIET_ROUNDS = 5


def spread(values: list[float]) -> dict[str, float]:
    """Return the median with the smallest and largest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def is_quiet(measured: dict[str, Any]) -> bool:
    """Whether others left the machine alone; takes what `CpuSeconds.since` returns."""
    return bool(measured["other_share"] <= MAX_OTHER_SHARE)


def usable(rounds: list[dict[str, Any]], *, wanted: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the rounds that count, and whether too few were quiet so that all of them have to."""
    quiet = [row for row in rounds if row["quiet"]]
    is_enough = len(quiet) >= min(MIN_QUIET_ROUNDS, wanted)
    return (quiet if is_enough else rounds), not is_enough


def are_enough(rounds: list[dict[str, Any]], *, wanted: int, most: int) -> bool:
    """Whether to stop: enough quiet rounds, or too many of them all."""
    return sum(row["quiet"] for row in rounds) >= wanted or len(rounds) >= most


def at_most(name: str, value: float, target: float) -> dict[str, Any]:
    """Return a bar that a value must not exceed."""
    return _bar(name, value, target, holds=value <= target, relation="at most")


def at_least(name: str, value: float, target: float) -> dict[str, Any]:
    """Return a bar that a value must reach."""
    return _bar(name, value, target, holds=value >= target, relation="at least")


def _bar(name: str, value: float, target: float, *, holds: bool, relation: str) -> dict[str, Any]:
    is_number = not math.isnan(value)
    return {"name": name, "value": value, "target": target, "relation": relation, "holds": is_number and holds}


def progress(line: str) -> None:
    """Tell a person who waits at a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(line + "\n")


def emit(result: dict[str, Any], *, as_json: bool) -> None:
    """Print everything as one JSON object, or for a reader the bars and what was `not_measured`."""
    if as_json:
        print(json.dumps({"code": provenance.code()} | result, indent=1))
        return
    for row in result["bars"]:
        verdict = "holds" if row["holds"] else "FAILS"
        print(f"{verdict}  {row['name']}: {row['value']:.3f} ({row['relation']} {row['target']})")
    for reason in result.get("not_measured", ()):
        print(f"not measured: {reason}")
