"""Do several ranks train with paging as they do in memory: bit for bit, in how much memory, by how many bytes?

    python benchmarks/distributed.py --json --ssd /mnt/nvme > benchmarks/results/distributed.json
    python benchmarks/distributed.py --smoke

A Llama over gloo, one thread a rank, with DDP and with `fully_shard` (FSDP2), in fp32 and computed in bf16.

- **identity**: two and three ranks, every combination of sharding, optimizer, clipping, accumulation and activations:
  losses, norms, weights and states beside those of the same ranks in memory. A rank has 40 % of its state, with DDP its
  gradients and 15 %.
- **traffic**: the bytes of all ranks' scratch files for each parameter and step, at 1, 2 and 4 ranks of FSDP2 that
  share the same memory.
- **overhead**: steps of two ranks with everything in memory, beside steps of two that page nothing, in turns.
"""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine import CpuSeconds
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, is_quiet, progress, spread, usable
from harness.worker_process import WorkerProcess, option_words, worker_command
from models.bare_llama import Shape

MIN_EQUAL = 120
MAX_RATIO_OF_BYTES = 1.3  # between counts of ranks that share the same memory
MAX_OVERHEAD = 1.02
SHARE = 0.4
KINDS_OF_STATE = 4
RESIDENT_BUDGET_BYTES = 4 << 30


@dataclass(frozen=True)
class Plan:
    """How much is trained, how often."""

    hidden: int = 128
    layers: int = 20
    rows: int = 2
    tokens: int = 64
    every: int = 1
    compared_ranks: tuple[int, ...] = (2, 3)
    traffic_hidden: int = 512
    traffic_ranks: tuple[int, ...] = (1, 2, 4)
    warmup_steps: int = 3
    rounds: int = 9
    steps_of_round: int = 3


SMOKE = Plan(
    hidden=128, layers=10, rows=1, tokens=16, every=29, compared_ranks=(2,), traffic_hidden=128, traffic_ranks=(1, 2),
    warmup_steps=1, rounds=1, steps_of_round=1,
)  # fmt: skip


class Group:
    """The ranks of a group, which take each command together."""

    def __init__(self, name: str, folder: str, ranks: int, **options: Any) -> None:
        self.workers: list[WorkerProcess] = []
        self._pool = ThreadPoolExecutor(ranks)
        group = Path(folder, f"{name}.group")
        words = option_words({"ranks": ranks, "group": group, "ssd": folder, **options})

        def start(rank: int) -> WorkerProcess:
            command = [*worker_command("rank"), *words, "--rank", str(rank)]
            return WorkerProcess(f"{name}-{rank}", command, log_directory=folder)

        self.workers = list(self._pool.map(start, range(ranks)))

    def ask(self, command: str) -> list[dict[str, Any]]:
        return list(self._pool.map(lambda worker: worker.ask(command), self.workers))

    def close(self) -> None:
        list(self._pool.map(WorkerProcess.close, self.workers))
        self._pool.shutdown()


@contextmanager
def group(name: str, folder: str, ranks: int, **options: Any) -> Iterator[Group]:
    made = Group(name, folder, ranks, **options)
    try:
        yield made
    finally:
        made.close()


def sizes(plan: Plan, hidden: int) -> dict[str, int]:
    return {"hidden": hidden, "layers": plan.layers, "rows": plan.rows, "tokens": plan.tokens}


def identity(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return what each combination was on its ranks together."""
    found = []
    for ranks in plan.compared_ranks:
        with group(f"identity{ranks}", folder, ranks, every=plan.every, **sizes(plan, plan.hidden)) as compared:
            for _ in range(compared.workers[0].description["cases"]):
                answers = compared.ask("compare")
                row = {
                    "ranks": ranks,
                    **answers[0]["case"],
                    "is_equal": all(answer["is_equal"] for answer in answers),
                    "compared_tensors": min(answer["digests"] for answer in answers),
                    "faults": sum(answer["faults"] for answer in answers),
                    "least_evictions": min(answer["evictions"] for answer in answers),
                    "peak_over_budget": max(answer["peak_bytes"] / answer["budget_bytes"] for answer in answers),
                }
                found.append(row)
                progress(f"{ranks} ranks, {answers[0]['case']}: {'equal' if row['is_equal'] else 'DIFFERENT'}")
    return found


def traffic(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return the bytes of a step for each count of ranks."""
    shape = sizes(plan, plan.traffic_hidden)
    found = []
    for ranks in plan.traffic_ranks:
        parameters = Shape(plan.traffic_hidden, 2 * plan.traffic_hidden, plan.layers, 4, 512).parameters
        budget = int(SHARE * KINDS_OF_STATE * 4 * parameters / ranks)
        with group(f"traffic{ranks}", folder, ranks, train="paged", budget_bytes=budget, **shape) as trained:
            for _ in range(plan.warmup_steps):
                trained.ask("step")
            steps = [trained.ask("step") for _ in range(plan.rounds)]
        counted = [{name: sum(answer[name] for answer in step) / parameters for name in step[0]} for step in steps]
        moved = {name: spread([step[name] for step in counted]) for name in ("read_bytes", "written_bytes")}
        by_kind = {name: spread([step[name] for step in counted]) for name in counted[0] if "_bytes_of_" in name}
        found.append(
            {
                "ranks": ranks,
                "budget_bytes": budget,
                "parameters": parameters,
                "bytes_per_parameter": moved,
                "bytes_per_parameter_by_kind": {name: each for name, each in by_kind.items() if each["max"] > 0},
            }
        )
        progress(f"{ranks} ranks: {moved['read_bytes']['median']:.1f} read, {moved['written_bytes']['median']:.1f} B")
    return found


def overhead(plan: Plan, folder: str) -> dict[str, Any]:
    """Let two ranks in memory and two whose engine has room for everything take turns."""
    shape = sizes(plan, plan.traffic_hidden)
    rounds = []
    with (
        group("plain", folder, 2, train="plain", **shape) as plain,
        group("resident", folder, 2, train="paged", budget_bytes=RESIDENT_BUDGET_BYTES, **shape) as resident,
    ):
        for each in (plain, resident):
            for _ in range(plan.warmup_steps):
                each.ask("step")
        for _ in range(plan.rounds):
            begin = CpuSeconds.now()
            steps = [[each.ask("step") for _ in range(plan.steps_of_round)] for each in (plain, resident)]
            end = CpuSeconds.now()
            worked = sum(answer["cpu_seconds"] for turns in steps for answers in turns for answer in answers)
            seconds = [min(answers[0]["seconds"] for answers in turns) for turns in steps]
            others = {"other_share": other_share(begin, end, worked)}
            rounds.append({"seconds": seconds, "ratio": seconds[1] / seconds[0], **others, "quiet": is_quiet(others)})
    counted, is_disturbed = usable(rounds, wanted=plan.rounds)
    return {"ratio": spread([row["ratio"] for row in counted]), "disturbed": is_disturbed, "rounds": rounds}


def other_share(begin: CpuSeconds, end: CpuSeconds, worked: float) -> float:
    """Return the share of the machine that neither this process nor the ranks, which `worked` so long, had."""
    spent = end.machine - begin.machine + end.stolen - begin.stolen
    others = max(0.0, spent - worked - (end.process - begin.process))
    return others / ((end.wall - begin.wall) * (os.cpu_count() or 1))


def identity_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    return [
        at_most("combinations that differ from the same ranks in memory", sum(not row["is_equal"] for row in rows), 0),
        at_most("faults in all of them", sum(row["faults"] for row in rows), 0),
        at_least("fewest evictions on a rank of one", min(row["least_evictions"] for row in rows), 1),
        at_most("peak of pages over a rank's budget", max(row["peak_over_budget"] for row in rows), 1),
    ]


def full_bars(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge what a tiny model cannot show."""
    bars = []
    if "identity" in parts:
        equal = sum(row["is_equal"] for row in parts["identity"])
        bars.append(at_least("combinations equal to the same ranks in memory", equal, MIN_EQUAL))
    if "traffic" in parts:
        totals = [sum(part["median"] for part in row["bytes_per_parameter"].values()) for row in parts["traffic"]]
        ratio = max(totals) / min(totals)
        bars.append(at_most("bytes at one count of ranks over those at another", ratio, MAX_RATIO_OF_BYTES))
    if "overhead" in parts:
        ratio = parts["overhead"]["ratio"]["median"]
        bars.append(at_most("FSDP2 step with all in memory over plain", ratio, MAX_OVERHEAD))
    return bars


PARTS = {"identity": identity, "traffic": traffic, "overhead": overhead}


def main() -> None:
    parser = driver_parser(__doc__, smoke="a tiny model, few combinations")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else Plan()
    with tempfile.TemporaryDirectory(dir=options.ssd) as folder:
        parts = {name: PARTS[name](plan, folder) for name in options.parts}
    bars = [*identity_bars(parts.get("identity", [])), *([] if options.smoke else full_bars(parts))]
    result = {"benchmark": "distributed", "machine": machine(options.ssd), "plan": asdict(plan), **parts, "bars": bars}
    missing = [f"{name}: left out" for name in PARTS if name not in parts]
    emit(result | ({"not_measured": missing} if missing else {}), as_json=options.json)


if __name__ == "__main__":
    main()
