"""Two builds of the engine take turns at the same steps: what a change costs or gains.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python benchmarks/builds.py --before ../before --json --ssd /mnt/nvme > build/builds.json
    python benchmarks/builds.py --before . --smoke

`--before` and `--after` (default: this tree) are trees in each of which the extension was built in place with the torch
of this environment. Workers are this tree's, with the package of either; a pair of processes takes turns step by step.
Two processes of one build differ by some percent from beginning to end, so several pairs are begun one after the other.
The model is train_step.py's. Ratios are of after over before, round by round. The result names the commits of both
trees, `-dirty` where files differ from them.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.disk import DiskProbe
from harness.provenance import git, machine
from harness.reporting import at_most, emit, progress, spread, usable
from harness.rounds import take_turns
from harness.worker_process import BENCHMARKS, WorkerProcess
from models.workloads import FEW, RESIDENT, TINY, Workload

NUMBERS = ("seconds", "process_cpu_seconds", "ssd_read_bytes", "ssd_written_bytes", "peak_resident_bytes")
QUARTER = 0.25
PAIRS = (
    (Workload("resident, 256 tokens", batch=1, sequence=256, checkpointing=0), RESIDENT),
    (replace(FEW, name="quarter, 128 tokens"), QUARTER),
    (Workload("quarter, 2048 tokens", batch=8, sequence=256, checkpointing=1), QUARTER),
    (replace(FEW, name="quarter, 128 tokens, pages of 64 KiB", page_elements=1 << 14), QUARTER),
)


def start(tree: Path, name: str, workload: Workload, share: float, ssd: str) -> WorkerProcess:
    """Start a worker of this tree over the package of another."""
    options = workload.step_options(budget_bytes=int(share * workload.state_bytes), ssd=ssd)
    search_path = os.pathsep.join([str(BENCHMARKS), str(tree)])
    command = ["env", f"PYTHONPATH={search_path}", "PYTHONSAFEPATH=1", sys.executable, "-m", "workers.step", *options]
    return WorkerProcess(name, command, log_directory=ssd)


def run_pair(
    trees: dict[str, Path], workload: Workload, share: float, ssd: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Begin a process of each build and let them take turns; return the rounds, and whether the weights differ."""
    probe = DiskProbe(ssd, probe_bytes=(16 if options.smoke else 256) << 20)
    workers: dict[str, WorkerProcess] = {}
    try:
        for name, tree in trees.items():
            workers[name] = start(tree, name, workload, share, ssd)
            for _ in range(options.warmup):
                workers[name].step()
        turns = {name: worker.step for name, worker in workers.items()}
        rounds = take_turns(turns, wanted=options.rounds, most=3 * options.rounds, probe=probe)
        final = {name: worker.ask("finish") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    for name, tree in trees.items():
        if Path(final[name]["package"]).parent != tree:
            raise SystemExit(f"{name}: measured {final[name]['package']}, which is not in {tree}")
    weights = {state["weights_sha256"] for state in final.values()}
    return {"rounds": rounds, "weights_differ": len(weights) > 1}


def compare(
    trees: dict[str, Path], workload: Workload, share: float, ssd: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Let both builds take turns at a workload; return the spreads of each and of the ratios, and the rounds."""
    progress(workload.name)
    pairs = [run_pair(trees, workload, share, ssd, options) for _ in range(options.pairs)]
    chosen = [usable(pair["rounds"], wanted=options.rounds) for pair in pairs]
    used = [row for rows, _ in chosen for row in rows]
    steps = {name: [row["steps"][name] for row in used] for name in trees}
    return {
        "workload": asdict(workload),
        "budget_share": share,
        "disturbed": any(is_disturbed for _, is_disturbed in chosen),
        "weights_differ": any(pair["weights_differ"] for pair in pairs),
        "builds": {
            name: {key: spread([step[key] for step in steps[name]]) for key in NUMBERS if key in steps[name][0]}
            for name in trees
        },
        "after_over_before": {
            key: spread([after[key] / before[key] for before, after in zip(*steps.values(), strict=True)])
            for key in NUMBERS
            if all(step.get(key) for both in steps.values() for step in both)
        },
        "ratio_by_pair": [ratio_of(rows) for rows, _ in chosen],
        "rounds": [pair["rounds"] for pair in pairs],
    }


def ratio_of(rows: list[dict[str, Any]]) -> float:
    """Median of the seconds of after over before."""
    return median(row["steps"]["after"]["seconds"] / row["steps"]["before"]["seconds"] for row in rows)


def commits_of(trees: dict[str, Path]) -> dict[str, str]:
    """Return what is measured, if called before it is."""
    return {
        name: git("-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        for name, tree in trees.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a tree with its extension built in place")
    parser.add_argument("--after", type=Path, default=BENCHMARKS.parent, help="the same; default: this tree")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the bars")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, in seconds: shows that it runs")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--pairs", type=int, default=3, help="of processes, for each workload")
    parser.add_argument("--rounds", type=int, default=3, help="of each pair")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ssd", help="directory on a real disk; default: the current one", default=".")
    options = parser.parse_args()
    if options.smoke:
        options.pairs, options.rounds, options.warmup = 1, 1, 1
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    for tree in trees.values():
        if not list((tree / "torch_offload").glob("_C.*.so")):
            parser.error(f"no extension in {tree / 'torch_offload'}; run there: python setup.py build_ext --inplace")
    about = {"benchmark": "builds", "machine": machine(options.ssd), "trees": commits_of(trees)}
    pairs = ((TINY, QUARTER),) if options.smoke else tuple(pair for pair in PAIRS if options.only in pair[0].name)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        results = [compare(trees, workload, share, scratch, options) for workload, share in pairs]
    bars = [
        at_most(f"weights that differ, {result['workload']['name']}", int(result["weights_differ"]), 0)
        for result in results
    ]
    if not options.smoke:
        ratios = {row["workload"]["name"]: row["after_over_before"]["seconds"]["median"] for row in results}
        bars += [at_most(f"step after over before, {name}", ratio, 1) for name, ratio in ratios.items()]
    emit(about | {"pairs": results, "bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
