"""What disk traffic takes from compute: both cores multiply matrices while our I/O engine reads, writes or does both.

    python benchmarks/interference.py --json --ssd /mnt/nvme      (some 2 minutes)

Traffic costs processor time however it is arranged: requests are built, completions handled, memory bandwidth shared,
and in a virtual machine the host copies on the same cores. So a step cannot be faster than max(compute + interference,
bytes / bandwidth). `interference()` measures the middle term, for a benchmark to use in the same run.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import io_program
from harness.machine import CpuSeconds
from harness.provenance import machine
from harness.reporting import are_enough, emit, is_quiet, progress, spread, usable

DIRECTIONS = ("read", "write", "mix")
SETTLE_SECONDS = 0.2  # until the traffic has filled its queue: the window must see nothing but full traffic


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    window_seconds: float = 2.0
    rounds: int = 5
    most_rounds: int = 12
    file_bytes: int = 2 << 30
    size: int = 1024  # of the square matrices


SMOKE = Plan(window_seconds=0.3, rounds=1, most_rounds=1, file_bytes=64 << 20, size=256)


class Multiplier:
    """Multiplies two matrices for a while with all of torch's threads."""

    def __init__(self, size: int) -> None:
        self.operations = 2 * size**3
        self.left, self.right = torch.rand(size, size), torch.rand(size, size)
        self.product = torch.empty(size, size)

    def rate(self, seconds: float) -> dict[str, float]:
        """Return what was computed per second, beside the time it took."""
        started = time.perf_counter()
        count = 0
        while (elapsed := time.perf_counter() - started) < seconds:
            torch.mm(self.left, self.right, out=self.product)
            count += 1
        return {"operations_per_second": count * self.operations / elapsed, "seconds": elapsed}


def with_traffic(multiplier: Multiplier, command: list[str], seconds: float) -> dict[str, Any]:
    """Multiply while the program that `command` starts moves blocks."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "started":
            raise SystemExit(f"{' '.join(command)} did not start: status {process.wait()}")
        time.sleep(SETTLE_SECONDS)
        computed = multiplier.rate(seconds)
        if process.poll() is not None:
            raise SystemExit("the traffic ended before the computation did")
        moved = json.loads(process.stdout.read())
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    rates = {way: moved[f"{way}_bytes"] / moved["seconds"] for way in ("read", "written")}
    cpu_share = moved["processor_seconds"] / moved["seconds"]
    return computed | {f"{way}_bytes_per_second": rate for way, rate in rates.items()} | {"traffic_cpus": cpu_share}


def take_round(multiplier: Multiplier, program: Path, file: Path, plan: Plan) -> dict[str, Any]:
    """Measure each direction between two windows without traffic."""
    before = CpuSeconds.now()
    alone = [multiplier.rate(plan.window_seconds)["operations_per_second"]]
    directions: dict[str, Any] = {}
    for direction in DIRECTIONS:
        seconds = plan.window_seconds + 3 * SETTLE_SECONDS
        shape = {"file_bytes": plan.file_bytes, "direction": direction, "seconds": seconds, "huge_pages": True}
        measured = with_traffic(multiplier, io_program.command_of(program, file, **shape), plan.window_seconds)
        alone.append(multiplier.rate(plan.window_seconds)["operations_per_second"])
        left = measured["operations_per_second"] / (sum(alone[-2:]) / 2)
        bytes_per_second = measured["read_bytes_per_second"] + measured["written_bytes_per_second"]
        lost = {"compute_left": left, "seconds_per_gigabyte": max(0.0, 1 - left) / (bytes_per_second / 1e9)}
        directions[direction] = measured | {"bytes_per_second": bytes_per_second} | lost
    used = CpuSeconds.now().since(before)
    return used | {"quiet": is_quiet(used), "alone": alone, "directions": directions}


def interference(ssd: str, plan: Plan = Plan()) -> dict[str, Any]:
    """Return the compute rate left under disk traffic, and what a gigabyte costs.

    Args:
        ssd: Directory on the disk; a file of `plan.file_bytes` lies there meanwhile.
        plan: How long and how often.

    Returns:
        ``operations_per_second`` without traffic; for ``read``, ``write`` and ``mix`` the spreads of ``compute_left``
        (share of that rate), ``bytes_per_second`` of the traffic, ``traffic_cpus`` (processors that its process
        used) and ``seconds_per_gigabyte``: seconds of the whole machine that 1e9 bytes take from the computation,
        in every direction; ``disturbed`` if too few rounds were quiet; and the ``rounds``.
    """
    program = io_program.build()
    multiplier = Multiplier(plan.size)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=ssd) as scratch:
        file = Path(scratch, "blocks")
        mib = plan.file_bytes >> 20
        io_program.run(program, file, file_bytes=plan.file_bytes, direction="write", mib=mib)  # lays the file out
        multiplier.rate(plan.window_seconds)
        while not are_enough(rounds, wanted=plan.rounds, most=plan.most_rounds):
            rounds.append(take_round(multiplier, program, file, plan))
            left = {name: round(row["compute_left"], 3) for name, row in rounds[-1]["directions"].items()}
            progress(f"compute left {left} {rounds[-1]['quiet']=}")
    return summarise(rounds, wanted=plan.rounds)


def summarise(rounds: list[dict[str, Any]], *, wanted: int) -> dict[str, Any]:
    used, is_disturbed = usable(rounds, wanted=wanted)
    result: dict[str, Any] = {
        "operations_per_second": spread([rate for row in used for rate in row["alone"]]),
        "threads": torch.get_num_threads(),
        "disturbed": is_disturbed,
    }
    for direction in DIRECTIONS:
        rows = [row["directions"][direction] for row in used]
        result[direction] = {name: spread([row[name] for row in rows]) for name in rows[0]}
    return result | {"rounds": rounds}


def interference_seconds(measured: dict[str, Any], *, read_bytes: float, written_bytes: float) -> float:
    """Return the seconds that so many bytes take from compute: each direction at its own price."""
    prices = {way: measured[way]["seconds_per_gigabyte"]["median"] for way in ("read", "write")}
    return float((read_bytes * prices["read"] + written_bytes * prices["write"]) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--smoke", action="store_true", help="short windows once: shows that it runs")
    parser.add_argument("--ssd", help="directory on a real disk; default: the current one", default=".")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    measured = interference(options.ssd, SMOKE if options.smoke else Plan())
    if options.json:
        emit({"benchmark": "interference", "machine": machine(options.ssd), **measured, "bars": []}, as_json=True)
        return
    for direction in DIRECTIONS:
        row = measured[direction]
        left, price = row["compute_left"]["median"], row["seconds_per_gigabyte"]["median"]
        print(f"{direction}: {left:.1%} of the compute rate left, {price:.3f} s of the machine per GB")


if __name__ == "__main__":
    main()
