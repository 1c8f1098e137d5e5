"""How long threads of a paged training step wait for the engine's locks, as a share of the step.

    python benchmarks/lock_waits.py --json > benchmarks/results/lock_waits.json     (some 5 minutes)
    python benchmarks/lock_waits.py --smoke

A library before pthread_mutex_lock tries each lock of the extension first and takes the time where that fails
(harness/lock_waits.c). One of the threads may be the program's: what it waits makes the step longer; what engine
threads wait delays transfers. Steps are those of train_step.py: in memory, with a quarter of it, and with a quarter of
it in small pages, which takes the locks more often.
"""

import collections
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread
from harness.worker_process import WorkerProcess, worker_command
from models.workloads import FEW, TINY, Case

MAX_PROGRAM_SHARE = 0.01  # of a step, waited for locks by the program's threads
SITES, SITE = 4096, struct.Struct("6Q")
PAGE_BYTES = 4096
MOST_PLACES = 5
SOURCE = Path(__file__).parent / "harness" / "lock_waits.c"


@dataclass(frozen=True)
class Site:
    """A place in the extension that locks one mutex, and what came of it so far."""

    mutex: int
    offset: int
    is_of_engine: bool
    calls: int
    waits: int
    waited_ns: int


CASES = [
    Case("in memory", replace(FEW, name="fp32, 256 tokens", sequence=256), 2.0),
    Case("a quarter", FEW, 0.25),
    Case("a quarter, pages of 64 KiB", replace(FEW, page_elements=1 << 14), 0.25),
]
SMOKE = [Case("smoke", TINY, 0.25)]


def build(folder: Path) -> Path:
    library = folder / "lock_waits.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def read_sites(counts: Path) -> dict[tuple[int, int, bool], Site]:
    sites = (Site(m, o, bool(e), c, w, n) for m, o, e, c, w, n in SITE.iter_unpack(counts.read_bytes()) if m)
    return {(site.mutex, site.offset, site.is_of_engine): site for site in sites}


def since(before: dict[tuple[int, int, bool], Site], after: dict[tuple[int, int, bool], Site]) -> Iterator[Site]:
    for key, site in after.items():
        earlier = before.get(key)
        if earlier is None:
            yield site
        elif site.calls > earlier.calls:
            counts = (site.calls - earlier.calls, site.waits - earlier.waits, site.waited_ns - earlier.waited_ns)
            yield Site(*key, *counts)


def extension() -> str:
    code = "import torch_offload._C as c; print(c.__file__)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def name_of(offset: int, library: str) -> str:
    """Return the functions that a place is inlined into, innermost of ours first."""
    found = subprocess.run(
        ["addr2line", "-Cfie", library, hex(offset - 1)], check=True, capture_output=True, text=True
    ).stdout.splitlines()[::2]
    ours = [function.split("(")[0] for function in found if function.startswith("torch_offload::")]
    return " < ".join(name.removeprefix("torch_offload::") for name in ours[:2]) or found[-1].split("(")[0]


def summarise(steps: list[tuple[float, list[Site]]], library: str) -> list[dict[str, Any]]:
    """Return a row for each mutex that somebody waited for, the one that was waited for longest first."""
    by_mutex: dict[int, list[Site]] = collections.defaultdict(list)
    for _, sites in steps:
        for site in sites:
            by_mutex[site.mutex].append(site)
    seconds = sum(step for step, _ in steps)
    rows = []
    for sites in by_mutex.values():
        places: collections.Counter[int] = collections.Counter()
        for site in sites:
            places[site.offset] += site.waited_ns
        rows.append(
            {
                "calls_per_step": sum(site.calls for site in sites) / len(steps),
                "waits_per_step": sum(site.waits for site in sites) / len(steps),
                "program_share": waited(sites, is_of_engine=False) / seconds,
                "engine_share": waited(sites, is_of_engine=True) / seconds,
                "waited_seconds_by_place": {
                    name_of(offset, library): nanoseconds / 1e9
                    for offset, nanoseconds in places.most_common(MOST_PLACES)
                },
            }
        )
    return sorted(rows, key=lambda row: -row["program_share"] - row["engine_share"])[:MOST_PLACES]


def waited(sites: list[Site], *, is_of_engine: bool) -> float:
    return sum(site.waited_ns for site in sites if site.is_of_engine == is_of_engine) / 1e9


def measure(case: Case, rounds: int, warmup: int, ssd: str, preloaded: Path, library: str) -> dict[str, Any]:
    progress(case.name)
    counts = Path(ssd, "lock_waits")
    counts.write_bytes(bytes(-(-SITES * SITE.size // PAGE_BYTES) * PAGE_BYTES))
    workload = case.workload
    options = workload.step_options(budget_bytes=int(case.budget_share * workload.state_bytes), ssd=ssd)
    environment = {
        "LD_PRELOAD": str(preloaded),
        "LOCK_WAITS_FILE": str(counts),
        "LOCK_WAITS_LIBRARY": library,
    }
    with WorkerProcess("locks", [*worker_command("step"), *options], log_directory=ssd, **environment) as worker:
        worker.warm_up(warmup)
        steps = []
        for _ in range(rounds):
            before = read_sites(counts)
            seconds = worker.step()["seconds"]
            steps.append((seconds, list(since(before, read_sites(counts)))))
    shares = {
        f"{who}_share": spread([waited(sites, is_of_engine=who == "engine") / seconds for seconds, sites in steps])
        for who in ("program", "engine")
    }
    return {
        "case": case.name,
        "seconds": spread([seconds for seconds, _ in steps]),
        "locks_per_step": sum(site.calls for _, sites in steps for site in sites) / len(steps),
        **shares,
        "mutexes": summarise(steps, library),
    }


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps that are measured, of each case")
    options = parser.parse_args()
    library = extension()
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        preloaded = build(Path(scratch))
        cases = SMOKE if options.smoke else CASES
        results = [
            measure(
                case, 2 if options.smoke else options.rounds, 1 if options.smoke else 3, scratch, preloaded, library
            )
            for case in cases
        ]
    bars = [at_least(f"locks per step, {result['case']}", result["locks_per_step"], 1) for result in results]
    if not options.smoke:
        for result in results:
            share = result["program_share"]["median"]
            bars.append(at_most(f"share of a step waited for locks, {result['case']}", share, MAX_PROGRAM_SHARE))
    emit(
        {"benchmark": "lock_waits", "machine": machine(options.ssd), "cases": results, "bars": bars},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
