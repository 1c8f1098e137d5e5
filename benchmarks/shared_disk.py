"""What do several ranks get of a disk that they share, each with a queue as deep as one alone would have, or a part?

    python benchmarks/shared_disk.py --json --ssd /mnt/nvme > benchmarks/results/shared_disk.json     (some 5 minutes)
    python benchmarks/shared_disk.py --smoke

Random reads, writes and both in turns of blocks of 4 MiB past the page cache, through the engine that pages use: one
process with the usual queue depth, four that have it each, four that divide it, and one that has the fourth part while
the others rest, in turns. Together the four should get what one gets, and alike.
"""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine import CpuSeconds
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import are_enough, at_least, emit, is_quiet, progress, spread, usable
from harness.worker_process import WorkerProcess, option_words, worker_command

MIN_SHARE = 0.9  # of the rate of one process
PATTERNS = ("read", "write", "mix")


@dataclass(frozen=True)
class Plan:
    """How much is moved, how often."""

    ranks: int = 4
    depth: int = 16
    file_bytes: int = 1 << 30
    block_bytes: int = 4 << 20
    seconds: float = 2
    rounds: int = 7
    most_rounds: int = 12

    @property
    def turns(self) -> dict[str, tuple[int, int]]:
        """How many processes use the disk at once, how deep each."""
        part = self.depth // self.ranks
        return {
            "one": (1, self.depth),
            "each": (self.ranks, self.depth),
            "divided": (self.ranks, part),
            "one_of_divided": (1, part),
        }


SMOKE = Plan(file_bytes=128 << 20, seconds=0.05, rounds=1, most_rounds=1)


def measure(plan: Plan, folder: str) -> dict[str, Any]:
    """Return what each turn got, by pattern."""
    words = option_words(
        {"ssd": folder, "file_bytes": plan.file_bytes, "block_bytes": plan.block_bytes, "max_depth": plan.depth}
    )
    command = [*worker_command("disk_user"), *words]
    with ExitStack() as stack:
        users = [
            stack.enter_context(WorkerProcess(f"rank{rank}", command, log_directory=folder))
            for rank in range(plan.ranks)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(plan.ranks))
        rounds: list[dict[str, Any]] = []
        while not are_enough(rounds, wanted=plan.rounds, most=plan.most_rounds):
            rounds.append(take_round(plan, users, pool, first=len(rounds)))
            progress(f"{len(rounds)}: {rounds[-1]['rates']}")
        descriptions = [user.description for user in users]
    counted, is_disturbed = usable(rounds, wanted=plan.rounds)
    return {
        "plan": asdict(plan),
        "disk_users": descriptions[0],
        "disturbed": is_disturbed,
        "patterns": {pattern: summed_up(plan, counted, pattern) for pattern in PATTERNS},
        "rounds": rounds,
    }


def take_round(plan: Plan, users: list[WorkerProcess], pool: ThreadPoolExecutor, *, first: int) -> dict[str, Any]:
    """Let each turn have each pattern; returns the rates of the processes, in bytes a second."""
    names = list(plan.turns)
    names = names[first % len(names) :] + names[: first % len(names)]
    begin = CpuSeconds.now()
    rates: dict[str, dict[str, list[float]]] = {pattern: {} for pattern in PATTERNS}
    worked = 0.0
    for pattern in PATTERNS:
        for name in names:
            count, depth = plan.turns[name]
            asked = json.dumps({"pattern": pattern, "depth": depth, "seconds": plan.seconds})
            answers = list(pool.map(lambda user, asked=asked: user.ask(asked), users[:count]))  # type: ignore[misc]
            rates[pattern][name] = [answer["rate"] for answer in answers]
            worked += sum(answer["cpu_seconds"] for answer in answers)
    used = CpuSeconds.now().since(begin, worked=worked)
    return used | {"rates": rates, "quiet": is_quiet(used)}


def summed_up(plan: Plan, rounds: list[dict[str, Any]], pattern: str) -> dict[str, Any]:
    """Return the rates of all processes together over that of one, and the least of one over the most."""
    found = [row["rates"][pattern] for row in rounds]
    return {"one_bytes_per_second": spread([sum(rates["one"]) for rates in found])} | {
        name: {
            "over_one": spread([sum(rates[name]) / sum(rates["one"]) for rates in found]),
            "least_over_most": spread([min(rates[name]) / max(rates[name]) for rates in found]),
        }
        for name in plan.turns
        if name != "one"
    }


def bars_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        at_least(f"{pattern}: four processes, {told}, over one", found[name]["over_one"]["median"], MIN_SHARE)
        for pattern, found in result["patterns"].items()
        for name, told in (("each", "each with the usual queue"), ("divided", "which divide it"))
    ]


def main() -> None:
    parser = driver_parser(__doc__, smoke="small files for seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = measure(SMOKE if options.smoke else Plan(), str(Path(scratch).resolve()))
    bars = [] if options.smoke else bars_of(result)
    emit({"benchmark": "shared_disk", "machine": machine(options.ssd)} | result | {"bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
