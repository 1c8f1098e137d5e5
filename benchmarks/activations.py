"""How long a row SmolLM2-135M can be fine-tuned on within one memory budget, and what that costs.

    python benchmarks/activations.py --json --ssd /mnt/nvme > benchmarks/results/activations.json     (some 30 minutes)
    python benchmarks/activations.py --smoke

First the longest row is found whose activations, kept in memory, fit the budget. Then a row of at least eight times as
many tokens is trained on, each way in a process of its own, taking turns step by step:
    plain                       in memory, without a budget
    plain_checkpointed          ... with gradient checkpointing
    paged                       within the budget, activations as pages that go to the SSD
    paged_checkpointed          within the budget, gradient checkpointing, activations kept

The loss of every step and the final weights of `paged` must equal those of `plain`, and so with checkpointing. A round
in which somebody else took more than a tenth of the machine's CPU is discarded, up to a limit; ratios are medians of
the ratios within a round. The raw disk is probed once per round.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.disk import DiskProbe
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Workers
from harness.worker_process import WorkerProcess, worker_command

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / ".cache" / "smollm2-135m"
MIN_MULTIPLE = 8


@dataclass(frozen=True)
class Plan:
    """What is run, and how often."""

    budget_bytes: int = 768 << 20
    search_tokens: int = 32  # the longest row is found to so many
    most_tokens: int = 8192  # the model's positions
    layers: int = 30
    rounds: int = 5
    most_rounds: int = 9
    probe_bytes: int = 256 << 20


SMOKE = Plan(budget_bytes=512 << 20, search_tokens=64, layers=8, rounds=2, most_rounds=2, probe_bytes=16 << 20)
VARIANTS = {
    "plain": [],
    "plain_checkpointed": ["--checkpointing"],
    "paged": ["--activations", "page"],
    "paged_checkpointed": ["--checkpointing"],
}


def start(name: str, plan: Plan, ssd: str, *, context: int, extra: list[str]) -> WorkerProcess:
    """Start the process of a variant; paged ones get the budget."""
    options = ["--model", str(MODEL), "--context", str(context), "--layers", str(plan.layers), *extra]
    if name.startswith("paged"):
        options += ["--budget-bytes", str(plan.budget_bytes), "--ssd", ssd]
    return WorkerProcess(name, [*worker_command("activations"), *options], log_directory=ssd)


def find_longest_kept(plan: Plan, ssd: str) -> int:
    """Return the longest row that trains within the budget while its activations stay in memory."""
    with start("paged_kept", plan, ssd, context=plan.search_tokens, extra=["--find"]) as worker:
        return int(worker.ask("step")["largest_context"])


def measure(plan: Plan, ssd: str) -> dict[str, Any]:
    """Find the longest kept row, train on one eight times as long."""
    kept = find_longest_kept(plan, ssd)
    progress(f"kept activations fit {kept} tokens")
    context = MIN_MULTIPLE * max(kept, plan.search_tokens)
    if context > plan.most_tokens:
        sys.exit(f"{MIN_MULTIPLE} times {kept} tokens are more than the model's {plan.most_tokens}")
    with Workers() as workers:
        for name, extra in VARIANTS.items():
            workers[name] = start(name, plan, ssd, context=context, extra=extra)
        workers.warm_up(1)
        probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        final = workers.finish()
        description = workers["plain"].description
    return {"kept_tokens": kept, "context": context, "rounds": rounds, "final": final, "description": description}


def summarise(result: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Add what the rounds come to."""
    used, is_disturbed = usable(result["rounds"], wanted=plan.rounds)
    summary: dict[str, Any] = {"disturbed": is_disturbed}
    for name in VARIANTS:
        steps = [row["steps"][name] for row in used]
        summary[name] = {key: spread([step[key] for step in steps]) for key in steps[0] if key != "loss"}
    summary["disk"] = {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]}
    ratios = {
        "paged over plain": ("paged", "plain"),
        "paged over paged_checkpointed": ("paged", "paged_checkpointed"),
        "paged_checkpointed over plain": ("paged_checkpointed", "plain"),
        "plain_checkpointed over plain": ("plain_checkpointed", "plain"),
    }
    summary["ratios"] = {
        label: spread([row["steps"][one]["seconds"] / row["steps"][other]["seconds"] for row in used])
        for label, (one, other) in ratios.items()
    }
    return result | {"summary": summary}


def bars_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what must hold. Times are reported, not judged."""
    bars = [at_least("context over the longest kept one", result["context"] / max(1, result["kept_tokens"]), 8)]
    for paged, plain in (("paged", "plain"), ("paged_checkpointed", "plain_checkpointed")):
        pairs = [(row["steps"][paged]["loss"], row["steps"][plain]["loss"]) for row in result["rounds"]]
        differing = sum(one != other for one, other in pairs)
        differing += result["final"][paged]["weights"] != result["final"][plain]["weights"]
        bars.append(at_most(f"{paged} losses and weights that differ from {plain}", differing, 0))
        final = result["final"][paged]
        bars.append(at_most(f"{paged} peak over budget", final["peak_bytes"] / final["budget_bytes"], 1))
    moved = min(row["steps"]["paged"]["activation_written_bytes"] for row in result["rounds"])
    bars.append(at_least("activation bytes to the SSD per step over the budget", moved / final["budget_bytes"], 1))
    return bars


def main() -> None:
    parser = driver_parser(__doc__, smoke="two layers, for a minute")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else Plan()
    subprocess.run([sys.executable, str(HERE.parent / "examples" / "demo_model.py"), str(MODEL)], check=True)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = summarise(measure(plan, scratch), plan)
    benchmark = {"benchmark": "activations", "machine": machine(options.ssd), "plan": vars(plan)}
    emit(benchmark | result | {"bars": bars_of(result)}, as_json=options.json)


if __name__ == "__main__":
    main()
