"""What a paged step could win if the thread that serves the disk did nothing else, such as checksums and looking ahead.

    python benchmarks/io_thread.py --json > benchmarks/results/io_thread.json     (some 6 minutes)
    python benchmarks/io_thread.py --smoke

While that thread computes, it hands the disk nothing. That costs time only where the disk has run out of requests
meanwhile, so a sampler looks a thousand times a second how long the thread has run and how many requests the disk has
(schedstat and inflight of the kernel). `idle_disk_share` is the part of a step in which the thread ran while the disk
had no request, half of the time between two looks where one of them says so: what another thread for its computing
could win at most. `thread_share` is the part in which it ran at all. Steps are those of train_step.py.
"""

import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.disk import DiskCounters, DiskProbe
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread
from harness.worker_process import WorkerProcess, worker_command
from models.workloads import FEW, TINY, Case

MAX_IDLE_DISK_SHARE = 0.02  # of a step; set before the first measurement
MAX_LATE_LOOKS = 0.01  # of all: more than MAX_GAP_SECONDS after the one before
PERIOD_SECONDS = 0.001
MAX_GAP_SECONDS = 0.02
THREAD = "to-ssd"


CASES = [
    Case("fp32, 32 tokens, a quarter", replace(FEW, name="fp32, 32 tokens", sequence=32), 0.25),
    Case("fp32, 128 tokens, a quarter", FEW, 0.25),
    Case("bf16, 128 tokens, a quarter", replace(FEW, name="bf16, 128 tokens", dtype="bf16"), 0.25),
    Case("fp32, 128 tokens, a quarter, pages of 64 KiB", replace(FEW, page_elements=1 << 14), 0.25),
]
SMOKE = [Case("smoke", TINY, 0.25)]


class Sampler:
    """Looks at one thread of another process and at the disk below a directory until it is stopped."""

    def __init__(self, process: int, directory: str) -> None:
        device = os.stat(directory).st_dev
        self._in_flight = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/inflight")
        self._times = thread_named(THREAD, process) / "schedstat"
        self._ended = threading.Event()
        self._idle_disk_ns = 0.0
        self._looks = self._late_looks = 0
        self._first_ns = self._ran()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.perf_counter()
        self._thread.start()

    def stop(self) -> dict[str, float]:
        self._ended.set()
        self._thread.join()
        seconds = time.perf_counter() - self._started
        return {
            "seconds": seconds,
            "thread_share": (self._ran() - self._first_ns) / 1e9 / seconds,
            "idle_disk_share": self._idle_disk_ns / 1e9 / seconds,
            "late_looks_share": self._late_looks / max(1, self._looks),
        }

    def _run(self) -> None:
        ran_ns, was_idle, seen = self._ran(), self._is_idle(), time.perf_counter()
        while not self._ended.wait(PERIOD_SECONDS):
            before, before_idle, before_seen = ran_ns, was_idle, seen
            ran_ns, was_idle, seen = self._ran(), self._is_idle(), time.perf_counter()
            self._looks += 1
            self._late_looks += seen - before_seen > MAX_GAP_SECONDS
            self._idle_disk_ns += (ran_ns - before) * (was_idle + before_idle) / 2

    def _ran(self) -> int:
        return int(self._times.read_text().split()[0])

    def _is_idle(self) -> bool:
        return sum(map(int, self._in_flight.read_text().split())) == 0


def thread_named(name: str, process: int) -> Path:
    """Return the folder of a process's thread in /proc."""
    for task in Path(f"/proc/{process}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return task
    raise SystemExit(f"process {process} has no thread named {name}: is it paged?")


def measure(case: Case, *, rounds: int, warmup: int, ssd: str, probe: DiskProbe) -> dict[str, Any]:
    progress(case.name)
    workload = case.workload
    options = workload.step_options(budget_bytes=int(case.budget_share * workload.state_bytes), ssd=ssd)
    steps: list[dict[str, float]] = []
    with WorkerProcess("io_thread", [*worker_command("step"), *options], log_directory=ssd) as worker:
        worker.warm_up(warmup)
        for _ in range(rounds):
            sampler, disk = Sampler(worker.process.pid, ssd), DiskCounters(ssd)
            answer = worker.step()
            steps.append(sampler.stop() | disk.since() | {"other_share": answer["other_share"]})
    return {"case": case.name, "disk": probe.bandwidth()} | {
        name: spread([step[name] for step in steps]) for name in steps[0]
    }


def bars_of(results: list[dict[str, Any]], *, judges: bool) -> list[dict[str, Any]]:
    name = "share in which the thread ran"
    bars = [at_least(f"{name}, {row['case']}", row["thread_share"]["min"], 1e-9) for row in results]
    if not judges:
        return bars
    for row in results:
        bars += [
            at_most(f"late looks, {row['case']}", row["late_looks_share"]["median"], MAX_LATE_LOOKS),
            at_most(
                f"share of a step that a thread for I/O alone could win, {row['case']}",
                row["idle_disk_share"]["median"],
                MAX_IDLE_DISK_SHARE,
            ),
        ]
    return bars


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps that are measured, of each case")
    options = parser.parse_args()
    rounds, warmup, cases = (2, 1, SMOKE) if options.smoke else (options.rounds, 3, CASES)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        probe = DiskProbe(scratch)
        results = [measure(case, rounds=rounds, warmup=warmup, ssd=scratch, probe=probe) for case in cases]
    bars = bars_of(results, judges=not options.smoke)
    emit(
        {"benchmark": "io_thread", "machine": machine(options.ssd), "cases": results, "bars": bars},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
