"""What paging coded experts costs: a mixture of experts ten times larger than its memory, generating and evaluating.

    python benchmarks/moe.py --json --ssd /mnt/nvme > benchmarks/results/moe.json     (up to 20 minutes, 20 GB of disk)
    python benchmarks/moe.py --smoke

Processes that take turns, each with its own model of the same shapes (workers/moe.py):
    resident        coded experts in memory
    paged           coded experts in a tenth of their bytes
    slow_disk       the same, on a disk slowed down so far that reads bind
    bf16            dense bf16 experts, paged by the same engine in the same memory

A step generates tokens from a new prompt and evaluates a new row. Tokens and losses of every step of `paged` and
`slow_disk` must equal those of `resident`. A round in which somebody else took more than a tenth of the machine's CPU
is discarded, up to a limit; ratios are medians of the ratios within a round. The raw disk is probed once per round.
What is read is judged twice: beside the disk itself, where computing may bind, and beside the emulated slow one.
"""

import tempfile
from dataclasses import dataclass, field
from typing import Any

from harness.disk import DiskProbe, seconds_at_disk_rate
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Workers
from harness.worker_process import WorkerProcess, worker_command

MIN_MULTIPLE = 10
PAGED = ("paged", "slow_disk")


@dataclass(frozen=True)
class Plan:
    """What is run, and how often."""

    shape: dict[str, int] = field(
        default_factory=lambda: {"layers": 8, "experts": 128, "choices": 8, "width": 1024, "expert-width": 2816}
    )
    new_tokens: int = 8
    zeros: float = 0.885
    slow_bytes_per_second: int = 100_000_000
    rounds: int = 5
    most_rounds: int = 9
    probe_bytes: int = 256 << 20
    judges_time: bool = True


SMOKE = Plan(
    shape={"layers": 4, "experts": 128, "choices": 2, "width": 512, "expert-width": 512, "page-elements": 1 << 15},
    new_tokens=2,
    slow_bytes_per_second=50_000_000,
    rounds=2,
    most_rounds=2,
    probe_bytes=16 << 20,
    judges_time=False,
)


def start(name: str, plan: Plan, ssd: str, *, budget_bytes: int = 0) -> WorkerProcess:
    """Start the process of a variant; paged ones get the budget."""
    options = ["--kind", "bf16" if name == "bf16" else "coded", "--zeros", str(plan.zeros)]
    options += [f"--{key}={value}" for key, value in plan.shape.items()]
    options += ["--new-tokens", str(plan.new_tokens)]
    if budget_bytes:
        options += ["--budget-bytes", str(budget_bytes), "--ssd", ssd]
    if name == "slow_disk":
        options += ["--disk-rate", str(plan.slow_bytes_per_second)]
    return WorkerProcess(name, [*worker_command("moe"), *options], log_directory=ssd)


def measure(plan: Plan, ssd: str) -> dict[str, Any]:
    """Let the variants take turns."""
    with Workers(resident=start("resident", plan, ssd)) as workers:
        description = workers["resident"].description
        budget_bytes = description["expert_bytes"] // MIN_MULTIPLE
        for name in (*PAGED, "bf16"):
            workers[name] = start(name, plan, ssd, budget_bytes=budget_bytes)
            progress(f"{name} is ready")
        workers.warm_up(1)
        probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        final = workers.finish()
    return {"budget_bytes": budget_bytes, "description": description, "rounds": rounds, "final": final}


def summarise(result: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Add what the rounds come to; a variant's `tokens_per_second` counts generated ones."""
    used, is_disturbed = usable(result["rounds"], wanted=plan.rounds)
    summary: dict[str, Any] = {"disturbed": is_disturbed}
    for name in result["final"]:
        steps = [row["steps"][name] for row in used]
        numbers = [key for key, value in steps[0].items() if not isinstance(value, str)]
        summary[name] = {key: spread([step[key] for step in steps]) for key in numbers}
        summary[name]["tokens_per_second"] = spread([plan.new_tokens / step["seconds"] for step in steps])
    summary["disk"] = {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]}
    reads = [row["steps"]["paged"] | row["disk"] for row in used]
    summary["ratios"] = {
        "paged over resident, generating": ratio(used, "paged", "resident", "seconds"),
        "paged over resident, evaluating": ratio(used, "paged", "resident", "evaluation_seconds"),
        "bf16 over paged, generating": ratio(used, "bf16", "paged", "seconds"),
        "bf16 over paged, evaluating": ratio(used, "bf16", "paged", "evaluation_seconds"),
        "experts that bf16 chooses over those of paged, evaluating": ratio(used, "bf16", "paged", "evaluation_chosen"),
        "paged reads over the disk's rate": spread(
            [
                seconds_at_disk_rate(step, read_bytes=step["read_bytes"], written_bytes=0) / step["seconds"]
                for step in reads
            ]
        ),
        "slow_disk reads over its rate": spread(
            [read_rate(row["steps"]["slow_disk"]) / plan.slow_bytes_per_second for row in used]
        ),
    }
    return result | {"summary": summary}


def ratio(rounds: list[dict[str, Any]], one: str, other: str, key: str) -> dict[str, float]:
    """Spread over rounds of one variant's figure over the other's."""
    return spread([row["steps"][one][key] / row["steps"][other][key] for row in rounds])


def read_rate(step: dict[str, Any]) -> float:
    """Bytes per second that a step read, generating and evaluating."""
    read_bytes = step["read_bytes"] + step["evaluation_read_bytes"]
    return float(read_bytes / (step["seconds"] + step["evaluation_seconds"]))


def bars_of(result: dict[str, Any], *, judges_time: bool) -> list[dict[str, Any]]:
    """Return what must hold. Against bf16 is reported, not judged."""
    ratios = result["summary"]["ratios"]
    chosen = ratios["experts that bf16 chooses over those of paged, evaluating"]
    bars = [
        at_least("fewest experts that bf16 chooses over those of paged", chosen["min"], 0.95),
        at_most("most experts that bf16 chooses over those of paged", chosen["max"], 1.05),
    ]
    for name in PAGED:
        differing = sum(
            row["steps"][name][key] != row["steps"]["resident"][key]
            for row in result["rounds"]
            for key in ("tokens", "loss")
        )
        bars.append(at_most(f"{name}: tokens and losses that differ from resident", differing, 0))
        final = result["final"][name]
        bars.append(at_most(f"{name}: peak over budget", final["peak_bytes"] / final["budget_bytes"], 1))
        multiple = result["description"]["expert_bytes"] / final["peak_bytes"]
        bars.append(at_least(f"{name}: expert bytes over its peak", multiple, MIN_MULTIPLE))
        read_bytes = min(row["steps"][name]["read_bytes"] for row in result["rounds"])
        bars.append(at_least(f"{name}: bytes read per step over the budget", read_bytes / final["budget_bytes"], 1))
    if judges_time:
        emulated = result["plan"]["slow_bytes_per_second"] / 1e6
        bars.append(
            at_least("paged: reads over the disk's rate", ratios["paged reads over the disk's rate"]["median"], 0.9)
        )
        share = ratios["slow_disk reads over its rate"]["median"]
        bars.append(at_least(f"slow_disk: reads over the rate of an emulated {emulated:.0f} MB/s disk", share, 0.9))
    return bars


def main() -> None:
    parser = driver_parser(__doc__, smoke="small, for a minute")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else Plan()
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = summarise(measure(plan, scratch), plan)
    result |= {"plan": vars(plan)}
    benchmark = {"benchmark": "moe", "machine": machine(options.ssd)}
    emit(benchmark | result | {"bars": bars_of(result, judges_time=plan.judges_time)}, as_json=options.json)


if __name__ == "__main__":
    main()
