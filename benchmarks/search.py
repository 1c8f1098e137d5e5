"""How near the setup that `torch-offload plan --search` chooses comes to the best of a full sweep.

    python benchmarks/search.py --json --ssd /mnt/nvme > benchmarks/results/search.json     (some hours)
    python benchmarks/search.py --reduced --ssd /mnt/nvme                                   (some two hours)
    python benchmarks/search.py --reduced --kept FOLDER --ssd /mnt/nvme                     (the same, in parts)
    python benchmarks/search.py --smoke

Twelve problems: a random-init Llama in fp32 with fused AdamW, steps of eight rows, three rates of the disk
(`emulation.ssd_rate`), budgets of a quarter and a half of the state, few and many tokens. In each the search chooses;
then every candidate trains for some steps in a process of its own, those that do not fit ending with an error. The
chosen one and the fastest others then take turns, and what they take is what counts: **regret** is the chosen one's
median step over the fastest one's. One whose first step, in which the moments are only made, takes several times the
fastest so far is not trained further, unless it is a baseline.

With --kept, each problem is solved once: its answer lies in that folder, and a later run of the same commit on the same
machine takes it from there, whichever problems (--only) either was asked for.

Baselines are the same script as it is usually written (1 row x 8), what `auto_find_batch_size` ends at (the most rows
that do not run out of memory), and checkpointing everywhere (8 x 1 and 1 x 8). Bytes are counted by the engine. A last
problem has LoRA adapters over a frozen base at a quarter of it.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from harness.options import driver_parser
from harness.provenance import code, machine
from harness.reporting import at_least, at_most, emit, progress, spread
from harness.rounds import Workers
from harness.worker_process import WorkerFailed, WorkerProcess, option_words, worker_command
from workers.adapters import TARGETS
from workers.step import make_configuration

import torch_offload
from torch_offload import Config

AS_IS = (1, 8, "page", False)
CHECKPOINTED = ((8, 1, "page", True), (1, 8, "page", True))
NEAR = 1.25  # times the fastest of the sweep: such ones take turns with the chosen one
MOST_RIVALS = 3
CLEARLY_SLOWER = 3  # times the fastest so far, in the first step already
SLACK = 1.05
LAXER_SLACK = 1.10


@dataclass(frozen=True)
class Problem:
    """One machine and one step."""

    name: str
    ssd_rate: int
    budget_share: float
    sequence: int
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """The model, the problems, how often."""

    hidden: int = 768
    intermediate: int = 3072
    layers: int = 8
    heads: int = 12
    vocabulary: int = 8192
    rows: int = 8
    page_elements: int = 1 << 20
    rates: tuple[int, ...] = (200_000_000, 800_000_000, 3_200_000_000)
    shares: tuple[float, ...] = (0.25, 0.5)
    sequences: tuple[int, ...] = (16, 128)
    adapters: Problem = field(default=Problem("LoRA", 400_000_000, 0.25, 16, rank=8))
    warmup: int = 2
    steps: int = 3
    rounds: int = 5
    timing_seconds: float = 30.0
    activations: str = ""  # "": all ways are searched
    only: tuple[str, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        every = [
            Problem(
                f"{rate / 1e6:.0f} MB/s, {share:.0%} of the state, {self.rows * sequence} tokens", rate, share, sequence
            )
            for rate in self.rates
            for share in self.shares
            for sequence in self.sequences
        ]
        return [problem for problem in every if not self.only or any(part in problem.name for part in self.only)]

    def parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def budget_bytes(self, problem: Problem) -> int:
        kinds = 1 if problem.rank else 4
        return int(problem.budget_share * kinds * 4 * self.parameters())

    def model_options(self, problem: Problem) -> dict[str, Any]:
        names = ("hidden", "intermediate", "layers", "heads", "vocabulary", "page_elements")
        return {name: getattr(self, name) for name in names} | {"sequence": problem.sequence}


REDUCED = replace(Plan(), hidden=512, intermediate=2048, layers=6, heads=8, vocabulary=4096, page_elements=1 << 18)
SMOKE = Plan(
    hidden=128,
    intermediate=512,
    layers=4,
    heads=4,
    vocabulary=512,
    rows=2,
    page_elements=1 << 13,
    rates=(100_000_000,),
    shares=(0.4,),
    sequences=(16,),
    adapters=Problem("LoRA", 100_000_000, 0.5, 16, rank=2),
    warmup=1,
    steps=1,
    rounds=1,
    timing_seconds=2.0,
    activations="page",
)


def model_of(plan: Plan, problem: Problem) -> torch.nn.Module:
    """Return the model on the meta device."""
    from transformers import LlamaForCausalLM

    options = argparse.Namespace(**plan.model_options(problem))
    with torch.device("meta"):
        model = LlamaForCausalLM(make_configuration(options)).train()
        if problem.rank:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=problem.rank, target_modules=TARGETS, task_type="CAUSAL_LM"))
    return model.train()


def search(plan: Plan, problem: Problem, ssd: str, probe: torch_offload.Probe) -> tuple[torch_offload.Search, float]:
    """Let the search choose; return it and the seconds that it took, recording and timing included."""
    ids = torch.ones(plan.rows, problem.sequence, dtype=torch.long)
    config = Config(
        ram=plan.budget_bytes(problem),
        ssd=ssd,
        page_elements=plan.page_elements,
        emulation={"ssd_rate": problem.ssd_rate},
    )
    if plan.activations:
        config = config.replace(activations=plan.activations)
    started = time.perf_counter()
    found = torch_offload.search(
        model_of(plan, problem),
        {"input_ids": ids, "labels": ids},
        config=config,
        probe=probe,
        timing_seconds=plan.timing_seconds,
    )
    return found, time.perf_counter() - started


def name_of(setup: Any) -> tuple[int, int, str, bool]:
    return (setup.rows, setup.accumulation, setup.activations, setup.checkpointing)


def worker_of(plan: Plan, problem: Problem, ssd: str, setup: Any) -> WorkerProcess:
    """Start a process that trains as a setup says."""
    options = plan.model_options(problem) | {
        "batch": setup.rows,
        "accumulation": setup.accumulation,
        "activations": setup.activations,
        "checkpointing": int(setup.checkpointing),
        "budget_bytes": plan.budget_bytes(problem),
        "ssd_rate": problem.ssd_rate,
        "rank": problem.rank,
        "ssd": ssd,
    }
    command = [*worker_command("split"), *option_words(options)]
    name = f"{setup.rows}x{setup.accumulation}-{setup.activations}-{int(setup.checkpointing)}"
    return WorkerProcess(name, command, log_directory=ssd)


def swept(plan: Plan, problem: Problem, ssd: str, setup: Any, enough_seconds: float) -> dict[str, Any]:
    """Train some steps; return their median, or that memory ran out. One, if that takes longer than is of interest."""
    try:
        with worker_of(plan, problem, ssd, setup) as worker:
            steps = [worker.step()]
            if steps[0]["seconds"] <= enough_seconds:
                worker.warm_up(plan.warmup - 1)
                steps = [worker.step() for _ in range(plan.steps)]
    except WorkerFailed as failure:
        if "OutOfTierMemory" not in str(failure) and "out of memory" not in str(failure):
            raise
        return {"fits": False}
    figures = {key: statistics.median(step[key] for step in steps) for key in ("seconds", "ssd_read_bytes")}
    figures |= {"ssd_written_bytes": statistics.median(step["ssd_written_bytes"] for step in steps)}
    return {"fits": True, "loss": steps[-1]["loss"], "steps": len(steps), **figures}


def duel(plan: Plan, problem: Problem, ssd: str, rivals: list[Any]) -> dict[str, Any]:
    """Let setups take turns; return the seconds of each."""
    with Workers() as workers:
        for setup in rivals:
            worker = worker_of(plan, problem, ssd, setup)
            workers[worker.name] = worker
        workers.warm_up(plan.warmup)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.rounds)
    return {name: spread([row["steps"][name]["seconds"] for row in rounds]) for name in workers}


def solve(plan: Plan, problem: Problem, ssd: str, probe: torch_offload.Probe) -> dict[str, Any]:
    """Search, sweep, and let the fastest take turns with the chosen one."""
    found, search_seconds = search(plan, problem, ssd, probe)
    if found.best is None:
        sys.exit(f"{problem.name}: {found.advice}")
    best = found.best
    progress(f"{problem.name}: chose {best.setup}, {best.seconds:.2f} s, in {search_seconds:.1f} s")
    sweep: list[dict[str, Any]] = []
    baselines = set(baseline_setups(plan).values())
    for each in sorted([*found.candidates, *found.refused], key=lambda each: each.seconds):
        fastest = min((row["measured"]["seconds"] for row in sweep if row["measured"]["fits"]), default=math.inf)
        is_baseline = name_of(each.setup) in baselines or name_of(each.setup)[2:] == AS_IS[2:]
        measured = swept(plan, problem, ssd, each.setup, math.inf if is_baseline else CLEARLY_SLOWER * fastest)
        sweep.append({"setup": name_of(each.setup), "planned": each.to_dict(), "measured": measured})
        progress(f"  {each.setup}: planned {each.seconds:.2f} s, {measured}")
    ran = [row for row in sweep if row["measured"]["fits"]]
    fastest = min(row["measured"]["seconds"] for row in ran)
    setups = {name_of(each.setup): each.setup for each in [*found.candidates, *found.refused]}
    near = sorted(
        (row for row in ran if row["measured"]["seconds"] <= NEAR * fastest), key=lambda row: row["measured"]["seconds"]
    )
    rivals = [best.setup, *(setups[row["setup"]] for row in near if row["setup"] != name_of(best.setup))]
    turns = duel(plan, problem, ssd, rivals[: 1 + MOST_RIVALS])
    medians = [seconds["median"] for seconds in turns.values()]
    chosen = next(row for row in sweep if row["setup"] == name_of(best.setup))
    return {
        "problem": asdict(problem),
        "probe": probe.to_dict(),
        "chosen": name_of(best.setup),
        "planned_seconds": best.seconds,
        "search_seconds": search_seconds,
        "regret": medians[0] / min(medians),
        "turns": turns,
        "chosen_fits": chosen["measured"]["fits"],
        "baselines": baselines_of(sweep, chosen, plan),
        "sweep": sweep,
    }


def kept(plan: Plan, problem: Problem, ssd: str, probe: torch_offload.Probe, folder: Path | None) -> dict[str, Any]:
    """Solve a problem, or take what an earlier run of the same code, on the same machine, has kept of it.

    Raises:
        SystemExit: If code is modified: another run could not tell which one was measured.
    """
    if folder is None:
        return solve(plan, problem, ssd, probe)
    measured_code = code()
    if measured_code["modified_files"]:
        sys.exit(f"--kept needs a commit; modified: {', '.join(measured_code['modified_files'])}")
    of_every = asdict(replace(plan, only=()))
    key = [measured_code["commit"], measured_code["torch"], machine(ssd), of_every, asdict(problem)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = folder / f"{digest[:24]}.json"
    if not path.exists():
        solved = solve(plan, problem, ssd, probe) | {"date": measured_code["date"]}
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(solved))
        unfinished.replace(path)
    return dict(json.loads(path.read_text()))


def baseline_setups(plan: Plan) -> dict[str, tuple[int, int, str, bool]]:
    """Return those that are the same in every problem."""
    return {
        "1 row, accumulated": (AS_IS[0], plan.rows, *AS_IS[2:]),
        "checkpointed, one batch": (plan.rows, 1, *CHECKPOINTED[0][2:]),
        "checkpointed, accumulated": (1, plan.rows, *CHECKPOINTED[1][2:]),
    }


def baselines_of(sweep: list[dict[str, Any]], chosen: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return seconds and bytes of each baseline over the chosen one's."""
    by_setup = {row["setup"]: row["measured"] for row in sweep}
    named = baseline_setups(plan)
    as_is = named["1 row, accumulated"]
    fitting = [name for name, row in by_setup.items() if row["fits"] and name[2:] == as_is[2:]]
    named["auto_find_batch_size"] = max(fitting, default=as_is)
    return {label: _beside(by_setup.get(name, {"fits": False}), chosen["measured"]) for label, name in named.items()}


def _beside(measured: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    if not measured["fits"] or not chosen["fits"]:
        return {"fits": measured["fits"]}
    theirs, ours = (row["ssd_read_bytes"] + row["ssd_written_bytes"] for row in (measured, chosen))
    seconds = chosen["seconds"] / measured["seconds"]
    return {"fits": True, "chosen_seconds_over_it": seconds, "chosen_bytes_over_it": ours / theirs if theirs else 1.0}


def bars_of(problems: list[dict[str, Any]], adapters: dict[str, Any], *, is_smoke: bool) -> list[dict[str, Any]]:
    """Return what must hold. A smoke run judges no times."""
    every = [*problems, adapters]
    bars = [at_most("chosen ones that ran out of memory", sum(not row["chosen_fits"] for row in every), 0)]
    bars.append(at_most("longest search, s", max(row["search_seconds"] for row in every), 60))
    quarter = min(row["problem"]["budget_share"] for row in problems)
    for label, rows, target in (("fp32", problems, 0.5), ("LoRA", [adapters], 0.15)):
        shares = [
            row["baselines"]["1 row, accumulated"].get("chosen_bytes_over_it", math.nan)
            for row in rows
            if label == "LoRA" or row["problem"]["budget_share"] == quarter
        ]
        worst = worst_of(shares)
        bars.append(at_most(f"{label}: bytes of the chosen one over 1 row accumulated, worst", worst, target))
    if is_smoke:
        return [bar for bar in bars if not bar["name"].startswith(("longest", "fp32", "LoRA"))]
    regrets = [row["regret"] for row in problems]
    near = sum(regret <= SLACK for regret in regrets)
    bars.append(at_least(f"problems with a regret of at most {SLACK}", near, len(problems) - 1))
    bars.append(at_most("worst regret", max(regrets), LAXER_SLACK))
    return bars


def worst_of(shares: list[float]) -> float:
    """Return the largest; not a number, which meets no bar, where one was not measured."""
    return math.nan if any(map(math.isnan, shares)) else max(shares)


def plan_of(options: argparse.Namespace) -> Plan:
    plan = SMOKE if options.smoke else REDUCED if options.reduced else Plan()
    plan = replace(plan, activations=options.activations or plan.activations)
    return replace(plan, only=tuple(options.only)) if options.only else plan


def main() -> None:
    parser = driver_parser(__doc__, smoke="one problem of a tiny model")
    parser.add_argument("--reduced", action="store_true", help="a model of a third of the size")
    parser.add_argument("--activations", default="", help="search this way of activations only")
    parser.add_argument("--only", nargs="*", help="problems whose names contain one of these")
    parser.add_argument("--kept", type=Path, help="folder with what earlier runs of this commit have solved")
    options = parser.parse_args()
    plan = plan_of(options)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        probe = torch_offload.probe(scratch)
        problems = [kept(plan, problem, scratch, probe, options.kept) for problem in plan.problems]
        adapters = kept(plan, plan.adapters, scratch, probe, options.kept)
    result = {
        "benchmark": "search",
        "machine": machine(options.ssd),
        "plan": asdict(plan),
        "problems": problems,
        "adapters": adapters,
        "bars": bars_of(problems, adapters, is_smoke=options.smoke),
    }
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
