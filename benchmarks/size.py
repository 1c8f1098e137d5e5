"""What grows with the size of a model: not its memory, and its step time no faster than its parameters.

    python benchmarks/size.py --json --ssd /mnt/nvme --dtype fp32 > benchmarks/results/size_fp32.json
    python benchmarks/size.py --json --ssd /mnt/nvme --sizes 0.1,0.4        (a short look)
    python benchmarks/size.py --smoke

Trains Llamas of 0.1, 0.4, 1.2 and 3 B parameters that differ in depth only, one after the other, each within the same
budget (--ram) and built within it too, batch 1 x 256 tokens with gradient checkpointing; then the largest once more in
a process limited to --large-limit, whose losses must be the same. fp32 with stock AdamW takes 16 bytes per parameter on
SSD, bf16 with torch_offload.AdamW 14: 48 or 42 GB for 3 B, checked before anything starts. The raw disk is probed
before every step; every step is listed, those that do not count included, with what it waited for.

Some 25 minutes on two cores and a disk of 1.5 GB/s, nearly all of it for the 3 B model.
"""

import argparse
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.disk import DiskCounters, DiskProbe, seconds_at_disk_rate
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import are_enough, at_least, at_most, emit, is_quiet, progress, spread, usable
from harness.worker_process import WorkerProcess, worker_command
from models.workloads import TINY, Workload

import torch_offload
from torch_offload.config import parse_size

BYTES_PER_PARAMETER = {"fp32": 16, "bf16": 14}
SPARE_SHARE = 1.08  # of the state on SSD: pages that are being replaced, the file's growth
SPARE_BYTES = 2 << 30
MAX_GROWTH = 1.05  # of the peak memory, from the smallest model to the largest
MAX_METADATA_SHARE = 0.001  # of the bytes of state that a larger model adds
MAX_DEVIATION = 0.15  # of a step time from the line through all of them
LARGE_PARAMETERS = 2.9e9


@dataclass(frozen=True)
class Plan:
    """Models, budget and steps."""

    layers: tuple[int, ...]
    workload: Workload
    dtype: str
    ram_bytes: int
    large_limit_bytes: int
    steps: int = 5
    most_steps: int = 7
    warmup: int = 2
    probe_bytes: int = 256 << 20


def layers_for(parameters: float, workload: Workload) -> int:
    """Return the depth whose model comes closest to so many parameters."""
    none, one = (replace(workload, layers=count).parameters for count in (0, 1))
    return max(1, round((parameters - none) / (one - none)))


def train(plan: Plan, workload: Workload, limit: list[str], probe: DiskProbe, scratch: str) -> dict[str, Any]:
    """Build and train one model; return its figures and its steps."""
    names = ("hidden", "intermediate", "layers", "heads", "vocabulary", "batch", "sequence", "checkpointing")
    values = asdict(workload)
    words = [word for name in names for word in (f"--{name}", str(values[name]))]
    words += ["--page-elements", str(workload.page_elements), "--ssd", scratch, "--dtype", plan.dtype, *limit]
    words += ["--optimizer", "offload"] if plan.dtype == "bf16" else []
    name = str(workload.parameters)
    with WorkerProcess(name, [*worker_command("size"), *words], log_directory=scratch) as worker:
        progress(f"{workload.parameters / 1e9:.2f} B parameters, built in {worker.description['build_seconds']:.1f} s")
        rounds = take_steps(plan, worker, probe, scratch)
        final = worker.ask("finish")
    return figures(plan, workload, worker, rounds, final["report"])


def take_steps(plan: Plan, worker: WorkerProcess, probe: DiskProbe, scratch: str) -> list[dict[str, Any]]:
    losses = [worker.step()["loss"] for _ in range(plan.warmup)]
    rounds: list[dict[str, Any]] = []
    while not are_enough(rounds, wanted=plan.steps, most=plan.most_steps):
        disk = probe.bandwidth()
        counters = DiskCounters(scratch)
        step = worker.step() | counters.since()
        losses.append(step["loss"])
        rounds.append(step | {"quiet": is_quiet(step), "disk": disk})
        progress(f"    step of {step['seconds']:.2f} s, loss {float.fromhex(step['loss']):.4f} {rounds[-1]['quiet']=}")
    rounds[-1]["losses"] = losses  # of all steps, warm-up included
    return rounds


def figures(
    plan: Plan, workload: Workload, worker: WorkerProcess, rounds: list[dict[str, Any]], report: dict[str, Any]
) -> dict[str, Any]:
    used, is_disturbed = usable(rounds, wanted=plan.steps)
    told = worker.description
    beyond = worker.peak_resident_bytes - told["base_bytes"] - report["host_peak_bytes"]
    traffic = [row["ssd_read_bytes"] + row["ssd_written_bytes"] for row in used]
    at_probe = [
        seconds_at_disk_rate(row["disk"], read_bytes=row["ssd_read_bytes"], written_bytes=row["ssd_written_bytes"])
        for row in used
    ]
    return {
        "parameters": told["parameters"],
        "layers": workload.layers,
        "tokens_per_step": workload.batch * workload.sequence,
        "state_bytes": told["parameters"] * BYTES_PER_PARAMETER[plan.dtype],
        "seconds": spread([row["seconds"] for row in used]),
        "ssd_bytes_per_parameter": spread([count / told["parameters"] for count in traffic]),
        "share_of_disk_rate": spread([a / row["seconds"] for a, row in zip(at_probe, used, strict=True)]),
        "build_seconds": told["build_seconds"],
        "build_peak_resident_bytes": told["build_peak_resident_bytes"],
        "peak_resident_bytes": worker.peak_resident_bytes,
        "base_bytes": told["base_bytes"],
        "budget_bytes": told["budget_bytes"],
        "budget_peak_bytes": report["host_peak_bytes"],
        "bytes_beyond_base_and_budget": beyond,
        "ssd_file_bytes": report["ssd_file_bytes"],
        "losses": [float.fromhex(loss) for loss in rounds[-1]["losses"]],  # no bit is lost
        "disturbed": is_disturbed,
        "steps": rounds,
    }


def step_line(step: dict[str, Any]) -> str:
    """Return what a step took and what it waited for, beside the disk's rate just before it."""
    rates = (step["disk"][f"{direction}_bytes_per_second"] / 1e9 for direction in ("read", "write", "mix"))
    probe = "/".join(f"{rate:.2f}" for rate in rates)
    verdict = "quiet" if step["quiet"] else f"NOT QUIET, others {step['other_share']:.0%}"
    waited = f"{step['seconds']:7.2f} s, stall_read {step['stall_read_seconds']:7.2f} s"
    queue = f"busy {step.get('disk_busy_share', 0):.0%}, {step.get('disk_requests_at_once', 0):.1f} requests at once"
    return f"    {waited}, disk {probe} GB/s, {queue}, {verdict}"


def print_steps(runs: list[dict[str, Any]]) -> None:
    """List every step of every model, those that do not count included."""
    for run in runs:
        took = run["seconds"]
        name = f"{run['parameters'] / 1e9:.2f} B in {run['budget_bytes'] / (1 << 30):.2f} GiB"
        print(f"{name}: {took['median']:.2f} s a step ({took['min']:.2f} to {took['max']:.2f}, {took['count']} steps)")
        print("\n".join(step_line(step) for step in run["steps"]))


def deviation_from_line(runs: list[dict[str, Any]]) -> float:
    """Return the largest relative distance of a step time from the line over parameters that fits them best.

    Least squares of relative errors, so that the small models count as much as the large ones.
    """
    points = [(run["parameters"], run["seconds"]["median"]) for run in runs]
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x, mean_y = (sum(w * p[i] for w, p in zip(weights, points, strict=True)) / total for i in (0, 1))
    across = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / across
    return max(abs(mean_y + slope * (x - mean_x) - y) / y for x, y in points)


def bars_of(
    plan: Plan, runs: list[dict[str, Any]], large: dict[str, Any] | None, *, is_timed: bool
) -> list[dict[str, Any]]:
    bars = []
    for run in [*runs, *([large] if large else [])]:
        name = f"{run['parameters'] / 1e9:.2f} B in {run['budget_bytes'] / (1 << 30):.2f} GiB"
        bars.append(at_most(f"peak over budget, {name}", run["budget_peak_bytes"] / run["budget_bytes"], 1))
        bars.append(at_least(f"loss falls by, {name}", run["losses"][0] - run["losses"][-1], 0))
    if not is_timed:
        return bars
    small, last = runs[0], runs[-1]
    if len(runs) > 1:
        growth = last["peak_resident_bytes"] / small["peak_resident_bytes"]
        bars.append(at_most("peak resident memory, largest over smallest", growth, MAX_GROWTH))
        added = last["bytes_beyond_base_and_budget"] - small["bytes_beyond_base_and_budget"]
        share = added / (last["state_bytes"] - small["state_bytes"])
        bars.append(at_most("metadata added per byte of state added", share, MAX_METADATA_SHARE))
    if len(runs) > 2:  # any two points lie on a line
        bars.append(at_most("step time off the line over parameters", deviation_from_line(runs), MAX_DEVIATION))
    if large:
        bars.append(at_least("parameters of the large run", large["parameters"], LARGE_PARAMETERS))
        pairs = list(zip(large["losses"], last["losses"], strict=False))  # one run may have taken more steps
        differing = sum(one != other for one, other in pairs)
        bars.append(at_most("losses of the large run that differ from those within the budget", differing, 0))
        limit = large["peak_resident_bytes"] / plan.large_limit_bytes
        bars.append(at_most("peak resident memory of the large run over its limit", limit, 1))
    return bars


def check_disk(plan: Plan, directory: str) -> None:
    """Refuse what the disk cannot hold before anything starts."""
    largest = max(replace(plan.workload, layers=count).parameters for count in plan.layers)
    needed = int(largest * BYTES_PER_PARAMETER[plan.dtype] * SPARE_SHARE) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise SystemExit(
            f"{largest / 1e9:.2f} B parameters in {plan.dtype} need {needed / 1e9:.1f} GB in {directory}, "
            f"{free / 1e9:.1f} GB are free, {(needed - free) / 1e9:.1f} GB are missing; "
            "free them, or choose fewer --sizes or --dtype bf16"
        )


def measure(plan: Plan, ssd: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    runs = []
    large = None
    with tempfile.TemporaryDirectory(dir=ssd) as scratch:
        probe = DiskProbe(scratch, probe_bytes=plan.probe_bytes)
        for count in plan.layers:
            workload = replace(plan.workload, layers=count)
            runs.append(train(plan, workload, ["--budget-bytes", str(plan.ram_bytes)], probe, scratch))
        if plan.large_limit_bytes:
            workload = replace(plan.workload, layers=plan.layers[-1])
            large = train(plan, workload, ["--process-limit-bytes", str(plan.large_limit_bytes)], probe, scratch)
    return runs, large


def make_plan(options: argparse.Namespace) -> Plan:
    if options.smoke:
        return Plan((2, 6), TINY, options.dtype, 32 << 20, 0, steps=1, most_steps=1, warmup=1, probe_bytes=16 << 20)
    workload = Workload("256 tokens", batch=1, sequence=256, checkpointing=1)
    layers = tuple(layers_for(float(size) * 1e9, workload) for size in options.sizes.split(","))
    limit_bytes = parse_size(options.large_limit)
    steps = {"steps": options.steps, "most_steps": max(options.steps, options.most_steps)}
    return Plan(layers, workload, options.dtype, parse_size(options.ram), limit_bytes, **steps)


def main() -> None:
    parser = driver_parser(__doc__, smoke="tiny models, in seconds")
    parser.add_argument("--dtype", choices=tuple(BYTES_PER_PARAMETER), default="fp32")
    parser.add_argument("--sizes", default="0.1,0.4,1.2,3.0", help="billions of parameters (default: %(default)s)")
    parser.add_argument("--ram", default="1GiB", help="the one budget (default: %(default)s)")
    parser.add_argument("--large-limit", default="6GiB", help="process limit of the extra run; 0: none (default: 6GiB)")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="quiet ones per model (default: %(default)s)")
    parser.add_argument("--most-steps", type=int, default=Plan.most_steps, help="quiet or not (default: %(default)s)")
    options = parser.parse_args()
    if options.dtype == "bf16" and not hasattr(torch_offload, "AdamW"):
        raise SystemExit("this torch_offload has no AdamW of its own, which bf16 needs; use --dtype fp32")
    plan = make_plan(options)
    check_disk(plan, options.ssd)
    runs, large = measure(plan, options.ssd)
    bars = bars_of(plan, runs, large, is_timed=not options.smoke)
    if not options.json:
        print_steps([*runs, *([large] if large else [])])
    result = {"benchmark": "size", "machine": machine(options.ssd), "dtype": plan.dtype, "runs": runs, "large": large}
    emit(result | {"bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
