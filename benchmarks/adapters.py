"""What LoRA costs over a frozen base that is twice as large as the memory it gets.

    python benchmarks/adapters.py --json --ssd /mnt/nvme > benchmarks/results/adapters.json     (some 10 minutes)
    python benchmarks/adapters.py --smoke

A random-init Llama of 218 M parameters in fp32 with PEFT's LoRA on every linear layer of its blocks, gradient
checkpointing, stock fused AdamW over the adapters. Processes that take turns step by step:
    plain               in memory, without torch_offload
    plain_huge          the same with malloc and torch asking for huge pages, as the pager does for its frames
    paged               within half of the bytes of the base

Nothing writes to the base, so its pages are read and dropped. Losses of every step and the final adapters of `paged`
must equal those of `plain`. A round in which somebody else took more than a tenth of the machine's CPU is discarded, up
to a limit; ratios are medians of the ratios within a round. The raw disk is probed once per round.
"""

import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.disk import DiskProbe, seconds_at_disk_rate
from harness.options import driver_parser
from harness.process_memory import PLAIN_HUGE
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Round, take_turns
from harness.worker_process import WorkerProcess, option_words, worker_command
from models.workloads import TINY, Workload

BASE_OVER_BUDGET = 2
FP32_BYTES = 4
MAX_RATIO = 1.10  # of a step over one in memory, where computing binds
TOKENS_BOUND_BY_COMPUTING = 2048


@dataclass(frozen=True)
class Plan:
    """What is run, and how often."""

    workloads: tuple[Workload, ...]
    rounds: int = 5
    most_rounds: int = 15
    warmup: int = 2
    probe_bytes: int = 256 << 20
    judges_time: bool = True


USUAL = Plan(
    (
        Workload("256 tokens", batch=1, sequence=256, checkpointing=1),
        Workload("2048 tokens", batch=8, sequence=256, checkpointing=1),
    )
)
SMOKE = Plan((TINY,), rounds=2, most_rounds=2, warmup=1, probe_bytes=16 << 20, judges_time=False)


def budget_of(workload: Workload) -> int:
    return workload.parameters * FP32_BYTES // BASE_OVER_BUDGET


def start(name: str, workload: Workload, ssd: str) -> WorkerProcess:
    """Start the process of a variant; its model is built when this returns."""
    shape = {key: value for key, value in asdict(workload).items() if key not in ("name", "dtype")}
    shape |= {"budget_bytes": budget_of(workload) if name == "paged" else 0, "ssd": ssd}
    options = option_words(shape)
    environment = PLAIN_HUGE if name == "plain_huge" else {}
    return WorkerProcess(name, [*worker_command("adapters"), *options], log_directory=ssd, **environment)


def measure(workload: Workload, plan: Plan, ssd: str) -> dict[str, Any]:
    """Let the variants take turns."""
    progress(workload.name)
    probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
    workers: dict[str, WorkerProcess] = {}
    try:
        for name in ("plain", "plain_huge", "paged"):
            workers[name] = start(name, workload, ssd)
            for _ in range(plan.warmup):
                workers[name].step()
        turns = {name: worker.step for name, worker in workers.items()}
        rounds = take_turns(turns, wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        final = {name: worker.ask("finish") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    described = {"workload": asdict(workload), "description": workers["paged"].description, "final": final}
    return described | {"budget_bytes": budget_of(workload), "rounds": rounds} | summarise(rounds, plan)


def summarise(rounds: list[Round], plan: Plan) -> dict[str, Any]:
    used, is_disturbed = usable(rounds, wanted=plan.rounds)
    paged = [row["steps"]["paged"] for row in used]
    at_rate = [
        seconds_at_disk_rate(row["disk"], read_bytes=step["ssd_read_bytes"], written_bytes=step["ssd_written_bytes"])
        for row, step in zip(used, paged, strict=True)
    ]
    return {
        "disturbed": is_disturbed,
        "seconds": {name: spread([row["steps"][name]["seconds"] for row in used]) for name in used[0]["steps"]},
        "paged_over_plain": ratio(used, "plain"),
        "paged_over_plain_huge": ratio(used, "plain_huge"),
        "ssd_read_bytes": spread([step["ssd_read_bytes"] for step in paged]),
        "ssd_written_bytes": spread([step["ssd_written_bytes"] for step in paged]),
        "share_of_disk_rate": spread([least / step["seconds"] for least, step in zip(at_rate, paged, strict=True)]),
        "disk": {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]},
    }


def ratio(rounds: list[Round], base: str) -> dict[str, float]:
    return spread([row["steps"]["paged"]["seconds"] / row["steps"][base]["seconds"] for row in rounds])


def bars_of(result: dict[str, Any], *, judges_time: bool) -> list[dict[str, Any]]:
    """Return what must hold; a step where the disk may bind is reported, not judged."""
    label, workload, final = result["workload"]["name"], result["workload"], result["final"]
    report = final["paged"]["report"]
    beyond_budget = result["description"]["base_bytes"] - result["budget_bytes"]
    read_bytes = min(row["steps"]["paged"]["ssd_read_bytes"] for row in result["rounds"])
    bars = [at_most(f"paged peak over budget, {label}", report["host_peak_bytes"] / report["budget_bytes"], 1)]
    for name in ("plain_huge", "paged"):
        differing = sum(row["steps"][name]["loss"] != row["steps"]["plain"]["loss"] for row in result["rounds"])
        differing += final[name]["adapters_sha256"] != final["plain"]["adapters_sha256"]
        bars.append(at_most(f"{name} losses and adapters that differ from plain, {label}", differing, 0))
    bars.append(at_least(f"bytes read per step over what does not fit, {label}", read_bytes / beyond_budget, 1))
    if judges_time and workload["batch"] * workload["sequence"] >= TOKENS_BOUND_BY_COMPUTING:
        for base in ("plain", "plain_huge"):
            bars.append(
                at_most(f"paged step over {base} step, {label}", result[f"paged_over_{base}"]["median"], MAX_RATIO)
            )
    return bars


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="quiet rounds to measure; default: 5")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else USUAL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        results = [measure(workload, plan, scratch) for workload in plan.workloads]
    bars = [bar for result in results for bar in bars_of(result, judges_time=plan.judges_time)]
    benchmark = {"benchmark": "adapters", "machine": machine(options.ssd), "workloads": results}
    emit(benchmark | {"bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
