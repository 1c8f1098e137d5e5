"""How long a paged training step takes beside plain torch's, and how far its SSD traffic is from the least possible.

    python benchmarks/train_step.py --json > benchmarks/results/train_step.json
    python benchmarks/train_step.py --smoke

A random-init Llama with stock fused AdamW, fp32. The variants live in processes of their own and take turns step by
step; between turns the raw disk is probed. A round in which somebody else took more than a tenth of the machine's CPU
during a step is discarded, up to a limit, and the figures are medians over the rounds that are left.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machine import DiskProbe
from optimum import optimum
from workloads import FULL, SMOKE, Plan, Workload

HERE = Path(__file__).resolve().parent
MOST_OTHER_SHARE = 0.10


class Variant:
    """A worker process."""

    def __init__(self, workload: Workload, budget_share: float, ssd: str) -> None:
        self.budget_bytes = int(budget_share * workload.state_bytes)
        shape = {name: value for name, value in asdict(workload).items() if name != "name"}
        shape |= {"budget_bytes": self.budget_bytes, "ssd": ssd}
        options = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.command = [sys.executable, str(HERE / "step_worker.py"), *options]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.description = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}: {self.command}")
        return dict(json.loads(line))

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def is_quiet(steps: dict[str, Any]) -> bool:
    return all(step["other_share"] <= MOST_OTHER_SHARE for step in steps.values())


def run_rounds(variants: dict[str, Variant], probe: DiskProbe, plan: Plan) -> list[dict[str, Any]]:
    """Let the variants take turns until enough rounds were quiet; the first variant of a round changes."""
    for variant in variants.values():
        for _ in range(plan.warmup):
            variant.ask("step")
    rounds: list[dict[str, Any]] = []
    while sum(row["quiet"] for row in rounds) < plan.rounds and len(rounds) < plan.most_rounds:
        names = list(variants)
        first = len(rounds) % len(names)
        disk = probe.bandwidth()
        steps = {name: variants[name].ask("step") for name in names[first:] + names[:first]}
        rounds.append({"quiet": is_quiet(steps), "disk": disk, "steps": steps})
        sys.stderr.write(f"{ {n: round(s['seconds'], 2) for n, s in steps.items()} } quiet={rounds[-1]['quiet']}\n")
    return rounds


def measure(workload: Workload, shares: dict[str, float], plan: Plan, ssd: str) -> dict[str, Any]:
    """Run one workload; return the rounds, the medians and the optimum of the variants."""
    probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
    variants = {name: Variant(workload, share, ssd) for name, share in shares.items()}
    rounds = run_rounds(variants, probe, plan)
    final = {name: variant.ask("finish") for name, variant in variants.items()}
    parts = variants["plain"].description["part_elements"]
    for variant in variants.values():
        variant.close()
    quiet = [row for row in rounds if row["quiet"]]
    used = quiet if len(quiet) >= min(5, plan.rounds) else rounds
    result: dict[str, Any] = {
        "workload": asdict(workload),
        "description": variants["plain"].description,
        "disturbed": used is not quiet,
        "disk": {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]},
        "variants": {name: summarise(name, used, final[name]) for name in variants},
        "rounds": rounds,
    }
    for name, variant in variants.items():
        if variant.budget_bytes:
            result["variants"][name] |= against_optimum(result, name, parts, variant.budget_bytes)
    return result


def summarise(name: str, rounds: list[dict[str, Any]], final: dict[str, Any]) -> dict[str, Any]:
    steps = [row["steps"][name] for row in rounds]
    numbers = [key for key, value in steps[0].items() if isinstance(value, (int, float))]
    ratios = [row["steps"][name]["seconds"] / row["steps"]["plain"]["seconds"] for row in rounds]
    return {"final": final, "ratio_to_plain": spread(ratios)} | {
        key: spread([s[key] for s in steps]) for key in numbers
    }


def against_optimum(result: dict[str, Any], name: str, parts: list[int], budget_bytes: int) -> dict[str, Any]:
    """Put the SSD bytes of a step beside the replay's least, and the time they need at the probed bandwidth."""
    variant = result["variants"][name]
    read, written = (variant[f"ssd_{way}_bytes"]["median"] for way in ("read", "written"))
    least_read, least_written = optimum(parts, budget_bytes)
    disk = result["disk"]
    disk_seconds = read / disk["read_bytes_per_second"]["median"] + written / disk["write_bytes_per_second"]["median"]
    parameters = sum(parts)
    return {
        "budget_bytes": budget_bytes,
        "ssd_bytes_per_parameter": (read + written) / parameters,
        "least_ssd_bytes_per_parameter": (least_read + least_written) / parameters,
        "disk_seconds_at_probed_bandwidth": disk_seconds,
    }


def bar(name: str, value: float, target: float) -> dict[str, Any]:
    return {"name": name, "value": value, "target": target, "holds": not math.isnan(value) and value <= target}


def bars_of(results: list[dict[str, Any]], *, is_timed: bool) -> list[dict[str, Any]]:
    """Return what must hold; ratios of step times only where steps are long enough to have some."""
    targets = {"resident": 1.05, "quarter": 1.25}
    bars = []
    for result in results:
        tokens = result["workload"]["name"]
        plain = result["variants"]["plain"]
        for name, target in targets.items():
            if name not in result["variants"]:
                continue
            variant = result["variants"][name]
            report = variant["final"]["report"]
            ratio = variant["seconds"]["median"] / plain["seconds"]["median"]
            if is_timed:
                bars.append(bar(f"{name} step over plain step, {tokens}", ratio, target))
            bars.append(
                bar(f"{name} peak over budget, {tokens}", report["host_peak_bytes"] / report["budget_bytes"], 1)
            )
            differing = count_differing(result["rounds"], name)
            differing += variant["final"]["weights_sha256"] != plain["final"]["weights_sha256"]
            bars.append(bar(f"{name} losses and weight hashes that differ, {tokens}", differing, 0))
    return bars


def count_differing(rounds: list[dict[str, Any]], name: str) -> int:
    return sum(row["steps"][name]["loss"] != row["steps"]["plain"]["loss"] for row in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the bars")
    parser.add_argument("--smoke", action="store_true", help="a tiny model for seconds: shows that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ssd", help="directory on a real disk; default: the current one", default=".")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else FULL
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        results = [measure(workload, shares, plan, scratch) for workload, shares in plan.workloads]
    bars = bars_of(results, is_timed=not options.smoke)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({"benchmark": "train_step", "machine": machine, "workloads": results, "bars": bars}, indent=1))
        return
    for row in bars:
        print(f"{'holds' if row['holds'] else 'FAILS'}  {row['name']}: {row['value']:.3f} (at most {row['target']})")


if __name__ == "__main__":
    main()
