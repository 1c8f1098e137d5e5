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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.disk import DiskProbe
from harness.options import driver_parser
from harness.provenance import commit_of, machine
from harness.reporting import at_most, emit, progress, spread, usable
from harness.rounds import Workers
from harness.worker_process import BENCHMARKS, WorkerProcess, tree_command
from models.workloads import FEW, RESIDENT, TINY, Workload

NUMBERS = (
    "seconds",
    "process_cpu_seconds",
    "ssd_read_bytes",
    "ssd_written_bytes",
    "cpu_seconds_per_gb",
    "peak_resident_bytes",
)
QUARTER = 0.25
WORKLOADS = (
    (Workload("resident, 256 tokens", batch=1, sequence=256, checkpointing=0), RESIDENT),
    (replace(FEW, name="quarter, 128 tokens"), QUARTER),
    (Workload("quarter, 2048 tokens", batch=8, sequence=256, checkpointing=1), QUARTER),
    (replace(FEW, name="quarter, 128 tokens, pages of 64 KiB", page_elements=1 << 14), QUARTER),
)


@contextmanager
def pair_of(trees: dict[str, Path], worker: str, options: Sequence[str], ssd: str) -> Iterator[Workers]:
    """Have a worker of this tree over the package of each tree; they end with the block."""
    with Workers() as workers:
        for name, tree in trees.items():
            workers[name] = WorkerProcess(name, [*tree_command(worker, tree), *options], log_directory=ssd)
        yield workers


def finished(workers: Workers, trees: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what workers say at their end; refuses one that measured another package."""
    final = workers.finish()
    for name, tree in trees.items():
        if Path(final[name]["package"]).parent != tree:
            raise SystemExit(f"{name}: measured {final[name]['package']}, which is not in {tree}")
    return final


def make_parser(description: str | None, *, smoke: str, rounds: int) -> argparse.ArgumentParser:
    """Return the options of a driver that compares builds; `smoke` is what its short run does."""
    parser = driver_parser(description, smoke=smoke)
    parser.add_argument("--before", type=Path, required=True, help="a tree with its extension built in place")
    parser.add_argument("--after", type=Path, default=BENCHMARKS.parent, help="the same; default: this tree")
    parser.add_argument("--pairs", type=int, default=3, help="of processes, for each workload")
    parser.add_argument("--rounds", type=int, default=rounds, help="of each pair")
    return parser


def trees_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Path]:
    """Return the trees, each with an extension."""
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    for tree in trees.values():
        if not list((tree / "torch_offload").glob("_C.*.so")):
            parser.error(f"no extension in {tree / 'torch_offload'}; run there: python setup.py build_ext --inplace")
    return trees


@dataclass(frozen=True)
class Comparison:
    """Both builds, and how often they take turns.

    Attributes:
        trees: By what they are called.
        ssd: Where they page.
        pairs: Of processes, for each workload.
        rounds: Of each pair.
        warmup: Steps of each process before.
        activations: A mode of `Config.activations`; "": the default of each build.
        probe_bytes: Of the disk's rate, looked at between rounds.
    """

    trees: dict[str, Path]
    ssd: str
    pairs: int
    rounds: int
    warmup: int
    activations: str = ""
    probe_bytes: int = 256 << 20

    def of(self, workload: Workload, share: float) -> dict[str, Any]:
        """Let both take turns at a workload; return the spreads of each and of the ratios, and the rounds."""
        progress(workload.name)
        pairs = [self._run_pair(workload, share) for _ in range(self.pairs)]
        chosen = [usable(pair["rounds"], wanted=self.rounds) for pair in pairs]
        used = [row for rows, _ in chosen for row in rows]
        steps = {name: [with_cost(row["steps"][name]) for row in used] for name in self.trees}
        return {
            "workload": asdict(workload),
            "budget_share": share,
            "disturbed": any(is_disturbed for _, is_disturbed in chosen),
            "weights_differ": any(pair["weights_differ"] for pair in pairs),
            "builds": {name: spreads_of(of_build) for name, of_build in steps.items()},
            "after_over_before": {
                key: ratios_of(steps, key)
                for key in NUMBERS
                if all(step.get(key) for both in steps.values() for step in both)
            },
            "ratio_by_pair": [ratio_of(rows) for rows, _ in chosen],
            "rounds": [pair["rounds"] for pair in pairs],
        }

    def _run_pair(self, workload: Workload, share: float) -> dict[str, Any]:
        """Begin a process of each build and let them take turns; return the rounds, and whether the weights differ."""
        options = workload.step_options(
            budget_bytes=int(share * workload.state_bytes), activations=self.activations, ssd=self.ssd
        )
        probe = DiskProbe(self.ssd, probe_bytes=self.probe_bytes)
        with pair_of(self.trees, "step", options, self.ssd) as workers:
            workers.warm_up(self.warmup)
            rounds = workers.take_turns(wanted=self.rounds, most=3 * self.rounds, probe=probe)
            final = finished(workers, self.trees)
        weights = {state["weights_sha256"] for state in final.values()}
        return {"rounds": rounds, "weights_differ": len(weights) > 1}


def with_cost(step: dict[str, Any]) -> dict[str, Any]:
    """Add the processor's time by what was moved, computing included, where anything was."""
    moved_bytes = step["ssd_read_bytes"] + step["ssd_written_bytes"]
    return step | ({"cpu_seconds_per_gb": step["process_cpu_seconds"] / moved_bytes * 1e9} if moved_bytes else {})


def spreads_of(steps: list[dict[str, Any]], keys: Sequence[str] = NUMBERS) -> dict[str, Any]:
    return {key: spread([step[key] for step in steps]) for key in keys if all(key in step for step in steps)}


def ratios_of(steps: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    """Return the spread of after over before, round by round."""
    return spread([after[key] / before[key] for before, after in zip(*steps.values(), strict=True)])


def ratio_of(rows: list[dict[str, Any]]) -> float:
    """Median of the seconds of after over before."""
    return median(row["steps"]["after"]["seconds"] / row["steps"]["before"]["seconds"] for row in rows)


def commits_of(trees: dict[str, Path]) -> dict[str, str]:
    """Return what is measured, if called before it is."""
    return {name: commit_of(tree) for name, tree in trees.items()}


def main() -> None:
    parser = make_parser(__doc__, smoke="a tiny model, in seconds", rounds=3)
    parser.add_argument("--only", action="append", help="workloads whose name contains this; may be repeated")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--activations", default="", help="a mode of Config.activations; default: that of each build")
    options = parser.parse_args()
    trees = trees_of(parser, options)
    about = {"benchmark": "builds", "machine": machine(options.ssd), "trees": commits_of(trees)}
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        if options.smoke:
            once = Comparison(
                trees, scratch, pairs=1, rounds=1, warmup=1, activations=options.activations, probe_bytes=16 << 20
            )
            results = [once.of(TINY, QUARTER)]
        else:
            comparison = Comparison(trees, scratch, options.pairs, options.rounds, options.warmup, options.activations)
            wanted = options.only or [""]
            results = [comparison.of(*one) for one in WORKLOADS if any(part in one[0].name for part in wanted)]
    bars = [
        at_most(f"weights that differ, {result['workload']['name']}", int(result["weights_differ"]), 0)
        for result in results
    ]
    if not options.smoke:
        ratios = {row["workload"]["name"]: row["after_over_before"]["seconds"]["median"] for row in results}
        bars += [at_most(f"step after over before, {name}", ratio, 1) for name, ratio in ratios.items()]
    emit(about | {"workloads": results, "bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
