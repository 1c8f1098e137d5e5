"""Does one rank's failure end the others soon, with its reason, and does training go on from the last checkpoint?

    python benchmarks/rank_failures.py --json --ssd /mnt/nvme > benchmarks/results/rank_failures.json
    python benchmarks/rank_failures.py --smoke

Three ranks over gloo train with `fully_shard`, each in 40 % of its state, and save after each step with
torch.distributed.checkpoint. In the second step the second rank is killed or stopped, or its disk cannot be read or has
damaged pages; or its disk fills up in the first one, or its budget is too small from the start.

- **failures**: how long the others go on, how they end and what they say; what is left behind. Then all ranks start
  anew: the last checkpoint, byte for byte, beside that of a run without failure.
- **restarts**: two ranks, then three, then two, each from the checkpoint of those before: byte for byte the files of
  the same runs in memory.
"""

import filecmp
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress
from harness.worker_process import option_words, worker_command

RANKS = 3
FAILING = 1
STEPS = 3
MAX_SECONDS = 5.0
TIMEOUT_SECONDS = 5.0  # of a collective, where a rank is stopped
PATIENCE_SECONDS = 300
TOLD = "torch_offload: another rank had failed before."
MAX_SHOWN = 4000

PHASES = ("forward", "backward", "step", "save")


@dataclass(frozen=True)
class Case:
    """How a rank fails, and where."""

    way: str
    phase: str
    error: str = ""  # that it raises itself, of torch_offload


CASES = (
    *(Case("killed", phase) for phase in PHASES),
    Case("stopped", "backward"),
    Case("disk does not read", "forward", "TierIOError"),
    Case("pages damaged", "forward", "PageCorruptError"),
    Case("disk full", "start", "TierIOError"),
    Case("budget too small", "start", "OutOfTierMemory"),
)
SMOKE_CASES = (CASES[0], CASES[-1])


@dataclass(frozen=True)
class Ended:
    """One rank's process."""

    status: int
    at: float  # by the monotonic clock
    answers: list[dict[str, Any]]
    errors: str

    @property
    def steps(self) -> int:
        return sum("step" in answer for answer in self.answers)


def run_ranks(
    folder: Path, ranks: int, *, steps: int = STEPS, flags: Sequence[str] = (), **options: Any
) -> list[Ended]:
    """Run a rank in each of some processes until all have ended; one that is stopped, until the others have."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = option_words({"ssd": folder, "steps": steps, **options})
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        command = [*worker_command("elastic"), *words, *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=os.environ | environment, text=True, **pipes))

    def end(process: subprocess.Popen[str]) -> Ended:
        answers, errors = process.communicate(timeout=PATIENCE_SECONDS)
        at = time.monotonic()
        return Ended(process.returncode, at, [loads(line) for line in answers.splitlines()], errors)

    with ThreadPoolExecutor(ranks) as pool:
        ending = [pool.submit(end, process) for process in processes]
        for other in ending[:FAILING] + ending[FAILING + 1 :]:
            other.result()
        if options.get("way") == "stopped":
            processes[FAILING].send_signal(signal.SIGKILL)  # the only signal that it still obeys
        return [each.result() for each in ending]


def checkpoints(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def differing_files(one: Path, other: Path) -> int:
    """Count the files with what ranks saved that are not the same in two checkpoints. Torch puts a random name into the
    one that lists them.
    """
    names = sorted({path.name for folder in (one, other) for path in folder.glob("*.distcp")})
    _, different, missing = filecmp.cmpfiles(one, other, names, shallow=False)
    return len(different) + len(missing) if names else 1


def failures(folder: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return what each failure was."""
    unbroken = checkpoints(folder, "unbroken")
    check(run_ranks(folder, RANKS, checkpoints=unbroken, flags=["--paged"]))
    return [fail(folder, case, unbroken) for case in cases]


def fail(folder: Path, case: Case, unbroken: Path) -> dict[str, Any]:
    saved = checkpoints(folder, f"{case.way} {case.phase}".replace(" ", "-"))
    kept = {path.name for path in folder.iterdir()}
    timeout = TIMEOUT_SECONDS if case.way == "stopped" else PATIENCE_SECONDS
    options = {"checkpoints": saved, "way": case.way, "phase": case.phase, "failing": FAILING, "timeout": timeout}
    ended = run_ranks(folder, RANKS, flags=["--paged"], **options)
    failed, others = ended[FAILING], [*ended[:FAILING], *ended[FAILING + 1 :]]
    lived_on = max(other.at for other in others) - failed.at
    told = [line for other in others for line in other.errors.splitlines() if line.startswith(TOLD)]
    row = {
        "way": case.way,
        "phase": case.phase,
        "raises": case.error,
        "failed": {"status": failed.status, "steps": failed.steps, "errors": failed.errors[-MAX_SHOWN:]},
        "statuses_of_others": [other.status for other in others],
        "errors_of_others": [other.errors[-MAX_SHOWN:] for other in others],
        "steps_of_others": [other.steps for other in others],
        "seconds_of_others": None if case.way == "stopped" else lived_on,
        "told": sum(f"rank {FAILING}: {case.error}:" in line for line in told) if case.error else None,
        "left": sorted({path.name for path in folder.iterdir()} - kept)
        if case.way not in ("killed", "stopped")
        else [],
    }
    again = run_ranks(folder, RANKS, steps=STEPS - row["failed"]["steps"], checkpoints=saved, flags=["--paged"])
    check(again)
    last = str(STEPS - 1)
    row["differing_files_after_restart"] = differing_files(saved / last, unbroken / last)
    row["least_evictions"] = min(rank.answers[-1]["evictions"] for rank in again)
    progress(f"{case.way} in {case.phase}: {row['statuses_of_others']}, told {row['told']}, {lived_on:.1f} s")
    return row


def check(ended: Sequence[Ended]) -> None:
    """Stop where ranks did not end well that nothing was done to."""
    for rank in ended:
        if rank.status != 0:
            raise SystemExit(f"a rank ended with status {rank.status}:\n{rank.errors[-MAX_SHOWN:]}")


def restarts(folder: Path, counts: Sequence[int]) -> dict[str, Any]:
    """Train on with another count of ranks each time, in memory and paged."""
    saved = {name: checkpoints(folder, name) for name in ("plain", "paged")}
    evictions = []
    for count in counts:
        for name, where in saved.items():
            ended = run_ranks(folder, count, steps=2, checkpoints=where, flags=["--paged"] if name == "paged" else [])
            check(ended)
            if name == "paged":
                evictions += [rank.answers[-1]["evictions"] for rank in ended]
    steps = [path.name for path in saved["plain"].iterdir()]
    return {
        "counts": list(counts),
        "checkpoints": len(steps),
        "differing_files": sum(differing_files(saved["plain"] / step, saved["paged"] / step) for step in steps),
        "least_evictions": min(evictions),
    }


def bars_of(rows: list[dict[str, Any]], changed: dict[str, Any]) -> list[dict[str, Any]]:
    statuses = list(itertools.chain.from_iterable(row["statuses_of_others"] for row in rows))
    raising = [row for row in rows if row["raises"]]
    silent = sum(RANKS - 1 - row["told"] for row in raising)
    small = [row for row in rows if row["way"] == "budget too small"]
    seconds = max(row["seconds_of_others"] for row in rows if row["seconds_of_others"] is not None)
    return [
        at_most("ranks that ended as if no other had failed", statuses.count(0), 0),
        at_most("ranks that a signal ended beside the one that failed", sum(status < 0 for status in statuses), 0),
        at_most("seconds that a rank lived on after one had failed", seconds, MAX_SECONDS),
        at_most("ranks that did not say what torch_offload's error on another was", silent, 0),
        at_most(
            "steps made beside a rank with too small a budget", sum(sum(row["steps_of_others"]) for row in small), 0
        ),
        at_most("things left in the scratch directory by ranks that raised", sum(len(row["left"]) for row in rows), 0),
        at_most(
            "files after a failure and a restart that differ from those without",
            sum(row["differing_files_after_restart"] for row in rows),
            0,
        ),
        at_most("files after restarts with other counts of ranks that differ", changed["differing_files"], 0),
        at_least("fewest evictions on a rank", min(row["least_evictions"] for row in [*rows, changed]), 1),
    ]


def main() -> None:
    parser = driver_parser(__doc__, smoke="two failures, one restart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.ssd) as folder:
        rows = failures(Path(folder), SMOKE_CASES if options.smoke else CASES)
        changed = restarts(Path(folder), (2, 3) if options.smoke else (2, 3, 2))
    result = {"benchmark": "rank_failures", "machine": machine(options.ssd), "failures": rows, "restarts": changed}
    emit(result | {"bars": bars_of(rows, changed)}, as_json=options.json)


if __name__ == "__main__":
    main()
