"""How much of fio's bandwidth our I/O engine reaches: 2 MiB reads, writes and the 1:1 mix at the same depth.

    python benchmarks/io.py --json --ssd /mnt/nvme > benchmarks/results/io.json      (some 6 minutes)
    python benchmarks/io.py --smoke

Both sides move the same bytes through the same file with O_DIRECT over one io_uring ring, with registered buffers and
the same number of transfers in flight; the mix tosses a coin per block on both sides. They are compared twice: with
buffers in pages of 4 KiB, and in huge pages, as the pager has them where its pages are whole (fio gets them through
its allocator: GLIBC_TUNABLES=glibc.malloc.hugetlb=1). What still differs: fio also registers the file and fills its
buffers with other bytes now and then; our engine looks at every result and keeps the wake-up of its owner armed.

A turn is fio, ours, ours, fio, so that a drift of the disk cancels; the ratio of a round is that of its four runs.
Between turns the raw disk is probed. fio is a system package: apt-get install fio.
"""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import io_program
from harness.disk import DiskProbe
from harness.machine import CpuSeconds
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import are_enough, at_least, emit, is_quiet, progress, spread, usable

MIN_SHARE = 0.95
DIRECTIONS = {"read": "read", "write": "write", "mix": "rw"}  # ours, and fio's word for it
HUGE_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class Plan:
    """How much is moved and how often."""

    file_bytes: int = 2 << 30
    depth: int = io_program.DEPTH
    rounds: int = 7
    most_rounds: int = 15
    probe_bytes: int = 256 << 20


SMOKE = Plan(file_bytes=64 << 20, rounds=1, most_rounds=1, probe_bytes=16 << 20)


@dataclass(frozen=True)
class Bench:
    """The two programs and the file that both of them use."""

    program: Path
    file: Path
    plan: Plan

    def ours(self, direction: str, *, huge_pages: bool) -> dict[str, float]:
        mib = self.plan.file_bytes >> 20
        options = {"depth": self.plan.depth, "mib": mib, "huge_pages": huge_pages, "engine": "uring_fixed"}
        answer = io_program.run(
            self.program, self.file, file_bytes=self.plan.file_bytes, direction=direction, **options
        )
        if answer["registered_buffers"] != self.plan.depth:
            raise SystemExit(f"{answer['registered_buffers']} of {self.plan.depth} buffers are registered: ulimit -l")
        moved_bytes = answer["read_bytes"] + answer["written_bytes"]
        return {"bytes": moved_bytes, "seconds": answer["seconds"], "cpu_seconds": answer["processor_seconds"]}

    def fio(self, direction: str, *, huge_pages: bool) -> dict[str, float]:
        command = [
            *("fio", "--name=peer", f"--filename={self.file}", f"--size={self.plan.file_bytes}"),
            *(f"--rw={DIRECTIONS[direction]}", "--rwmixread=50", f"--bs={io_program.BLOCK_BYTES}", "--direct=1"),
            *("--ioengine=io_uring", f"--iodepth={self.plan.depth}", "--fixedbufs=1", "--registerfiles=1"),
            "--output-format=json",
        ]
        environment = {**os.environ, **(HUGE_MALLOC if huge_pages else {})}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if ended.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}")
        job = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0]
        seconds = max(job[way]["runtime"] for way in ("read", "write")) / 1e3
        cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        return {
            "bytes": job["read"]["io_bytes"] + job["write"]["io_bytes"],
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }

    def turn(self, direction: str, *, huge_pages: bool) -> dict[str, Any]:
        """Run fio, ours, ours, fio."""
        before = CpuSeconds.now()
        runs: dict[str, list[dict[str, float]]] = {"fio": [], "ours": []}
        for name in ("fio", "ours", "ours", "fio"):
            runs[name].append(getattr(self, name)(direction, huge_pages=huge_pages))
        used = CpuSeconds.now().since(before)
        rates = {name: _sum(both, "bytes") / _sum(both, "seconds") for name, both in runs.items()}
        ratio = rates["ours"] / rates["fio"]
        return used | {"quiet": is_quiet(used), "runs": runs, "bytes_per_second": rates, "ratio": ratio}


def _sum(runs: list[dict[str, float]], name: str) -> float:
    return sum(run[name] for run in runs)


def summarise(rounds: list[dict[str, Any]], *, wanted: int) -> dict[str, Any]:
    used, is_disturbed = usable(rounds, wanted=wanted)
    rates = {name: spread([row["bytes_per_second"][name] for row in used]) for name in ("fio", "ours")}
    cpu = {
        name: spread(
            [_sum(row["runs"][name], "cpu_seconds") / (_sum(row["runs"][name], "bytes") / 1e9) for row in used]
        )
        for name in ("fio", "ours")
    }
    probes = {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]}
    return {
        "ratio": spread([row["ratio"] for row in used]),
        "bytes_per_second": rates,
        "cpu_seconds_per_gigabyte": cpu,
        "disk": probes,
        "disturbed": is_disturbed,
        "rounds": rounds,
    }


def measure(plan: Plan, directory: str) -> dict[str, dict[str, Any]]:
    """Run every direction in both kinds of pages until enough rounds were quiet."""
    program = io_program.build()
    cases = [(direction, huge) for huge in (False, True) for direction in DIRECTIONS]
    rounds: dict[tuple[str, bool], list[dict[str, Any]]] = {case: [] for case in cases}
    probe = DiskProbe(directory, probe_bytes=plan.probe_bytes)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        bench = Bench(program, Path(scratch, "blocks"), plan)
        bench.ours("write", huge_pages=True)  # lays the file out
        while open_cases := [
            case for case in cases if not are_enough(rounds[case], wanted=plan.rounds, most=plan.most_rounds)
        ]:
            for direction, huge in open_cases:
                disk = probe.bandwidth()
                row = bench.turn(direction, huge_pages=huge) | {"disk": disk}
                rounds[direction, huge].append(row)
                progress(f"{direction:5} {name_of_pages(huge_pages=huge)}: ratio {row['ratio']:.3f} {row['quiet']=}")
    return {
        f"{direction}, {name_of_pages(huge_pages=huge)}": summarise(rows, wanted=plan.rounds)
        for (direction, huge), rows in rounds.items()
    }


def name_of_pages(*, huge_pages: bool) -> str:
    return "huge pages" if huge_pages else "4 KiB pages"


def main() -> None:
    parser = driver_parser(__doc__, smoke="a small file once, in seconds")
    parser.add_argument("--rounds", type=int, help="quiet ones per case")
    parser.add_argument("--most-rounds", type=int, help="quiet or not, per case")
    parser.add_argument(
        "--depth", type=int, default=io_program.DEPTH, help="transfers in flight (default: %(default)s)"
    )
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: apt-get install fio")
    shape = SMOKE if options.smoke else Plan()
    rounds = options.rounds or shape.rounds
    plan = Plan(
        shape.file_bytes,
        options.depth,
        rounds,
        max(rounds, options.most_rounds or shape.most_rounds),
        shape.probe_bytes,
    )
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    cases = measure(plan, options.ssd)
    bars = []
    if not options.smoke:
        bars = [at_least(f"ours over fio, {name}", case["ratio"]["median"], MIN_SHARE) for name, case in cases.items()]
    result = {
        "benchmark": "io",
        "machine": machine(options.ssd),
        "fio": version,
        "depth": plan.depth,
        "cases": cases,
        "bars": bars,
    }
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
