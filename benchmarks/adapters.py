"""What LoRA costs over a frozen base that is twice as large as the memory it gets, in fp32, bf16 and NF4.

    python benchmarks/adapters.py --json --ssd /mnt/nvme > benchmarks/results/adapters.json     (some 30 minutes)
    python benchmarks/adapters.py --smoke
    python benchmarks/adapters.py --json --only "1.2 B" --before ../before --ssd /mnt/nvme      (some 15 minutes)

A random-init Llama of 218 M parameters in fp32 with PEFT's LoRA on every linear layer of its blocks, gradient
checkpointing, stock fused AdamW over the adapters. Processes that take turns step by step:
    plain               in memory, without torch_offload
    plain_huge          the same with malloc and torch asking for huge pages, as the pager does for its frames
    paged               within half of the bytes of the base

Nothing writes to the base, so its pages are read and dropped. Losses of every step and the final adapters of `paged`
must equal those of `plain`.

Then models from folders, SmolLM2-135M and one of 1.2 B parameters with random weights, in bf16 and quantized by
bitsandbytes to NF4 as they are loaded, each in memory and in half of the bytes of its base: `plain_bf16`, `paged_bf16`,
`plain_nf4`, `paged_nf4`. The embedding and the head of an NF4 base are in bf16. SmolLM2's are one matrix, of more than
half of that base: it gets what `wrap` asks for. With --before, a tree in which the extension was built in place with
the torch of this environment, the paged ones also run the package of that tree, as `before_bf16` and `before_nf4`.

A round in which somebody else took more than a tenth of the machine's CPU is discarded, up to a limit; ratios are
medians of the ratios within a round. The raw disk is probed once per round.
"""

import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.disk import DiskProbe, seconds_at_disk_rate
from harness.options import driver_parser
from harness.process_memory import PLAIN_HUGE
from harness.provenance import commit_of, machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Round, Workers
from harness.worker_process import WorkerProcess, option_words, tree_command, worker_command
from models.workloads import TINY, Workload

HERE = Path(__file__).resolve().parent
SMOLLM2 = HERE.parent / ".cache" / "smollm2-135m"
BASE_OVER_BUDGET = 2
FP32_BYTES = 4
STATE_COPIES = 4  # of adapters: weights, gradients, two moments
SPARE_PAGES = 4  # that an operator needs beside its tensor and the gradient of that
MAX_RATIO = 1.10  # of a step over one in memory, where computing binds
TOKENS_BOUND_BY_COMPUTING = 2048
MAX_QUANTIZED_RATIO = 1.15  # of a step over one in memory, in NF4
MAX_BYTES_OVER_BF16 = 0.30  # read of the base per step, in NF4


@dataclass(frozen=True)
class Plan:
    """What is run, and how often."""

    workloads: tuple[Workload, ...]
    folders: tuple[Workload, ...]  # named SMOLLM2.name: that model; others are random
    rank: int = 8  # of adapters over bases from folders
    rounds: int = 5
    most_rounds: int = 15
    warmup: int = 2
    probe_bytes: int = 256 << 20
    judges_time: bool = True
    before: Path | None = None  # a tree whose package is compared

    def only(self, name: str) -> "Plan":
        """Return the plan for the workloads of that name; all, if it is empty."""
        chosen = {
            kind: tuple(each for each in workloads if name in ("", each.name))
            for kind, workloads in (("workloads", self.workloads), ("folders", self.folders))
        }
        if not any(chosen.values()):
            names = ", ".join(each.name for each in (*self.workloads, *self.folders))
            sys.exit(f"--only: no workload is called {name!r}; there are: {names}")
        return replace(self, **chosen)


USUAL = Plan(
    (
        Workload("256 tokens", batch=1, sequence=256, checkpointing=1),
        Workload("2048 tokens", batch=8, sequence=256, checkpointing=1),
    ),
    (
        Workload(SMOLLM2.name, batch=1, sequence=64, checkpointing=1, vocabulary=49_152, page_elements=1 << 18),
        Workload(
            "1.2 B",
            batch=1,
            sequence=256,
            checkpointing=1,
            hidden=2048,
            intermediate=5632,
            layers=21,
            heads=32,
            vocabulary=32_000,
        ),
    ),
)
FEW_BITS = replace(TINY, name="smoke folder", batch=1, hidden=512, intermediate=2048, layers=16)
SMOKE = Plan((TINY,), (FEW_BITS,), rank=1, rounds=2, most_rounds=2, warmup=1, probe_bytes=16 << 20, judges_time=False)


def budget_of(workload: Workload) -> int:
    return workload.parameters * FP32_BYTES // BASE_OVER_BUDGET


def start(name: str, workload: Workload, ssd: str, *, tree: Path | None = None, **more: object) -> WorkerProcess:
    """Start the process of a variant, over the package of `tree` if given; its model is built when this returns."""
    shape = {key: value for key, value in asdict(workload).items() if key not in ("name", "dtype")}
    shape |= {"budget_bytes": budget_of(workload) if name == "paged" else 0, "ssd": ssd, **more}
    options = option_words(shape)
    environment = PLAIN_HUGE if name == "plain_huge" else {}
    command = worker_command("adapters") if tree is None else tree_command("adapters", tree)
    return WorkerProcess(name, [*command, *options], log_directory=ssd, **environment)


def measure(workload: Workload, plan: Plan, ssd: str) -> dict[str, Any]:
    """Let the variants take turns."""
    progress(workload.name)
    probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
    with Workers() as workers:
        for name in ("plain", "plain_huge", "paged"):
            workers[name] = start(name, workload, ssd)
        workers.warm_up(plan.warmup)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        final = workers.finish()
    del final["paged"]["package"]  # a path of this machine
    described = {"workload": asdict(workload), "description": workers["paged"].description, "final": final}
    return described | {"budget_bytes": budget_of(workload), "rounds": rounds} | summarise(rounds, plan)


def make_folder(workload: Workload, scratch: str) -> Path:
    """Return a folder with the model of a workload."""
    if workload.name == SMOLLM2.name:
        subprocess.run([sys.executable, str(HERE.parent / "examples" / "demo_model.py"), str(SMOLLM2)], check=True)
        return SMOLLM2
    folder = Path(scratch, "base")
    shape = {key: value for key, value in asdict(workload).items() if key not in ("name", "dtype")}
    command = [*worker_command("adapters")[:-1], "models.base_folder"]
    subprocess.run([*command, *option_words(shape | {"folder": folder})], check=True, stdout=subprocess.DEVNULL)
    return folder


def measure_folder(workload: Workload, plan: Plan, ssd: str) -> dict[str, Any]:
    """Let a base from a folder, in bf16 and in NF4, in memory and paged, take turns."""
    progress(workload.name)
    probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
    budgets: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=ssd) as scratch, Workers() as workers:
        folder = make_folder(workload, scratch)
        for kind, quantized in (("bf16", 0), ("nf4", 1)):
            base = {"folder": folder, "dtype": "bf16", "quantized": quantized, "rank": plan.rank}
            plain = workers[f"plain_{kind}"] = start(f"plain_{kind}", workload, ssd, **base)
            budgets[kind] = folder_budget(plain.description, workload)
            paged = {**base, "budget_bytes": budgets[kind]}
            workers[f"paged_{kind}"] = start(f"paged_{kind}", workload, ssd, **paged)
            if plan.before is not None:
                workers[f"before_{kind}"] = start(f"before_{kind}", workload, ssd, tree=plan.before, **paged)
        workers.warm_up(plan.warmup)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        final = workers.finish()
    described = {name: worker.description for name, worker in workers.items()}
    used, is_disturbed = usable(rounds, wanted=plan.rounds)
    seconds = {name: spread([row["steps"][name]["seconds"] for row in used]) for name in workers}
    ratios = {kind: ratio(used, f"plain_{kind}", paged=f"paged_{kind}") for kind in budgets}
    result = {"workload": asdict(workload), "descriptions": described, "budget_bytes": budgets, "rounds": rounds}
    result |= {"final": final, "disturbed": is_disturbed, "seconds": seconds, "paged_over_plain": ratios}
    for name, summary in final.items():
        package = summary.pop("package", None)  # a path of this machine; a plain worker has none
        if name.startswith("before") and Path(package).parent != plan.before:
            sys.exit(f"{name}: measured {package}, which is not in {plan.before}")
    if plan.before is None:
        return result
    after = {kind: ratio(used, f"before_{kind}", paged=f"paged_{kind}") for kind in budgets}
    return result | {"before": commit_of(plan.before), "paged_over_before": after}


def folder_budget(description: dict[str, Any], workload: Workload) -> int:
    """Half of the base, but never less than `wrap` takes for the largest tensor in bf16."""
    least = 2 * description["largest_bytes"] + SPARE_PAGES * 2 * workload.page_elements
    return max(int(description["base_bytes"]) // BASE_OVER_BUDGET, least)


def folder_bars(result: dict[str, Any], *, judges_time: bool) -> list[dict[str, Any]]:
    """Return what must hold of a base from a folder."""
    label, rounds, final = result["workload"]["name"], result["rounds"], result["final"]
    bars = []
    for kind in result["budget_bytes"]:
        plain, paged = f"plain_{kind}", f"paged_{kind}"
        report = final[paged]["report"]
        peak = report["host_peak_bytes"] / report["budget_bytes"]
        bars.append(at_most(f"{paged} peak over budget, {label}", peak, 1))
        differing = sum(row["steps"][paged]["loss"] != row["steps"][plain]["loss"] for row in rounds)
        differing += final[paged]["adapters_sha256"] != final[plain]["adapters_sha256"]
        bars.append(at_most(f"{paged} losses and adapters that differ from {plain}, {label}", differing, 0))
        own_bytes = STATE_COPIES * FP32_BYTES * result["descriptions"][paged]["adapter_parameters"]
        written = max(row["steps"][paged]["ssd_written_bytes"] for row in rounds)
        bars.append(at_most(f"{paged} bytes written per step over the adapters' own, {label}", written / own_bytes, 1))
        bars.append(at_most(f"{paged} accesses that no pin came before, {label}", report["faults"], 0))
        if judges_time:
            ratio = result["paged_over_plain"][kind]["median"]
            bars.append(at_most(f"{paged} step over {plain} step, {label}", ratio, MAX_QUANTIZED_RATIO))
        if judges_time and "before" in result:
            ratio = result["paged_over_before"][kind]["median"]
            bars.append(at_most(f"{paged} step over that before, {label}", ratio, 1))
    read = {
        kind: sum(row["steps"][f"paged_{kind}"]["weights_read_bytes"] for row in rounds)
        for kind in result["budget_bytes"]
    }
    if judges_time:  # of a tiny base, what is not base takes most of the budget
        over_bf16 = read["nf4"] / read["bf16"]
        bars.append(at_most(f"base bytes read per step, NF4 over bf16, {label}", over_bf16, MAX_BYTES_OVER_BF16))
    return bars


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


def ratio(rounds: list[Round], base: str, *, paged: str = "paged") -> dict[str, float]:
    return spread([row["steps"][paged]["seconds"] / row["steps"][base]["seconds"] for row in rounds])


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
    parser.add_argument("--only", default="", help="the workload of this name; default: all")
    parser.add_argument("--before", type=Path, help="a tree with its extension built in place")
    options = parser.parse_args()
    plan = (SMOKE if options.smoke else USUAL).only(options.only)
    before = options.before.resolve() if options.before else None
    plan = replace(plan, rounds=options.rounds or plan.rounds, before=before)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        results = [measure(workload, plan, scratch) for workload in plan.workloads]
        folders = [measure_folder(workload, plan, scratch) for workload in plan.folders]
    bars = [bar for result in results for bar in bars_of(result, judges_time=plan.judges_time)]
    bars += [bar for result in folders for bar in folder_bars(result, judges_time=plan.judges_time)]
    benchmark = {"benchmark": "adapters", "machine": machine(options.ssd), "workloads": results, "folders": folders}
    emit(benchmark | {"bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
