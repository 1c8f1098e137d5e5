"""What do shards, traffic and waits become at counts of ranks that no machine here has?

    python benchmarks/scale.py --json --ssd /mnt/nvme > benchmarks/results/scale.json
    python benchmarks/scale.py --smoke

- **one_of_many**: the real engine in one process that is the first of 8, 64 and 1,024 ranks of `fully_shard`, the
  others made up by torch's fake process group. Bytes, those of states and peak are counted, beside the best eviction of
  the same uses and 8 bytes of states for each parameter of the padded shard each way. There are twice as many layers
  as ranks, so that a rank's state is that of eight layers' weights, and its budget that of six.
- **validation**: a model of ranks (harness/rank_simulation.py), fed by what `torch-offload probe` says of the machine
  and by the steps of one rank alone, beside measured steps of 2 and 4 ranks that train by gloo, in turns.
- **simulated**: the same model printed to 4,096 ranks, two to a machine like this one, with the margin by which the
  engine reads ahead today, and with one longer by a quantile of the read times that depends on the ranks. Nothing in it
  is measured, and every row says so.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.machine import CpuSeconds
from harness.memory_group import end_cleanly_on_signals
from harness.options import driver_parser
from harness.provenance import machine
from harness.rank_group import Group, group
from harness.rank_model import MAX_SHARE_AHEAD, STEPS_TO_A_LATE_READ, TAIL_FROM, Rates, Work
from harness.rank_simulation import simulate
from harness.reporting import are_enough, at_most, emit, is_quiet, progress, spread, usable
from harness.worker_process import WorkerProcess, option_words, worker_command
from models.bare_llama import Shape

import torch_offload
from torch_offload.diagnostics import ssd_benchmark

MAX_COUNT_ERROR = 0.02
MAX_TIME_ERROR = 0.15
MAX_RATIO = 1.10
BYTES_OF_STATES = 8  # of each parameter, two moments in fp32
SMALLEST_SHARD = 1 << 14  # elements, in memory that can be a page
LAYERS_IN_BUDGET = 6  # gathered ones: what fully_shard has at once of layers of one matrix is up to four
KINDS_OF_STATE = 4
SHARE = 0.4  # of a rank's state that it has memory for
RANKS_OF_HOST = 2  # in what is simulated
SEED = 1


@dataclass(frozen=True)
class Plan:
    """How much is trained and simulated."""

    counted_ranks: tuple[int, ...] = (8, 64, 1024)
    least_hidden: int = 1024
    layers_of_rank: int = 2
    warmup_steps: int = 2
    hidden: int = 512
    layers: int = 20
    rows: int = 2
    tokens: int = 64
    page_elements: int = 1 << 18
    measured_ranks: tuple[int, ...] = (2, 4)
    rounds: int = 7
    most_rounds: int = 15
    steps_alone: int = 5  # of a round: their reads tell the tail
    compared_steps: int = 20
    simulated_ranks: tuple[int, ...] = (2, 8, 64, 512, 1024, 4096)
    simulated_steps: int = 2


SMOKE = Plan(
    counted_ranks=(8,), least_hidden=512, layers_of_rank=4, warmup_steps=1, hidden=128, layers=16, rows=1, tokens=16,
    page_elements=1 << 12, measured_ranks=(2,), rounds=1, most_rounds=1, steps_alone=1, compared_steps=2,
    simulated_ranks=(2, 8),
)  # fmt: skip


# --- One rank of many ------------------------------------------------------------------------------------------------


def one_of_many(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return what the first rank of each count moved in a step, and had in memory, beside what was to be expected."""
    return [first_of(ranks, plan, folder) for ranks in plan.counted_ranks]


def first_of(ranks: int, plan: Plan, folder: str) -> dict[str, Any]:
    hidden = max(plan.least_hidden, math.isqrt(SMALLEST_SHARD * ranks))
    options = {
        "model": "stack",
        "hidden": hidden,
        "layers": plan.layers_of_rank * ranks,
        "rows": 1,
        "tokens": -(-SMALLEST_SHARD // hidden),
        "budget_bytes": LAYERS_IN_BUDGET * 4 * hidden**2,
        "device": "meta",
    }
    with fake_rank(f"first-of-{ranks}", folder, ranks, train="paged", **options) as worker:
        for _ in range(plan.warmup_steps):
            worker.ask("step")
        replayed, step, shard = worker.ask("replay"), worker.ask("step"), worker.ask("shard")
    states = BYTES_OF_STATES * shard["shard_parameters"]
    moved_states = step["read_bytes_of_state"] + step["written_bytes_of_state"]
    row = {
        "ranks": ranks,
        "layers": options["layers"],
        **shard,
        "step": step,
        "replayed": replayed,
        "error_of_bytes": replayed["moved_bytes"] / replayed["least_bytes_beside_peaks"] - 1,
        "error_of_states": moved_states / (2 * states) - 1,
        "error_of_peak": step["peak_bytes"] / replayed["replayed_peak_bytes"] - 1,
    }
    progress(f"first of {ranks}: { {name: round(row[name], 4) for name in row if name.startswith('error')} }")
    return row


def fake_rank(name: str, folder: str, ranks: int, **options: Any) -> WorkerProcess:
    """Return a process that is the first rank of a group that is not there."""
    words = option_words({"backend": "fake", "rank": 0, "ranks": ranks, "group": "none", "ssd": folder, **options})
    return WorkerProcess(name, [*worker_command("scale_rank"), *words], log_directory=folder)


# --- The model beside measured ranks ---------------------------------------------------------------------------------


class Measured:
    """Ranks over gloo, and for each count of them one that is alone, paged and in memory, which take turns."""

    def __init__(self, plan: Plan, folder: str, stack: ExitStack) -> None:
        shape = {name: getattr(plan, name) for name in ("hidden", "layers", "rows", "tokens", "page_elements")}
        self._steps_alone = plan.steps_alone
        self.groups: dict[int, Group] = {}
        self.alone: dict[int, WorkerProcess] = {}
        self.plain: dict[int, WorkerProcess] = {}
        for ranks in plan.measured_ranks:
            paged = {"train": "paged", "budget_bytes": budget_of(plan, ranks), **shape}
            made = group(f"measured{ranks}", folder, ranks, worker="scale_rank", **paged)
            self.groups[ranks] = stack.enter_context(made)
            self.alone[ranks] = stack.enter_context(fake_rank(f"alone{ranks}", folder, ranks, **paged))
            self.plain[ranks] = stack.enter_context(fake_rank(f"plain{ranks}", folder, ranks, train="plain", **shape))

    def take_round(self) -> dict[str, Any]:
        """Have each step, those alone some times; of a group, the first rank's answer."""
        begin = CpuSeconds.now()
        row: dict[str, Any] = {"group": {}, "alone": {}, "plain": {}}
        worked = 0.0
        for ranks, made in self.groups.items():
            answers = made.ask("profile")
            alone = [self.alone[ranks].ask("profile") for _ in range(self._steps_alone)]
            plain = self.plain[ranks].ask("profile")
            worked += sum(each["cpu_seconds"] for each in (*answers, *alone, plain))
            row["group"][ranks], row["alone"][ranks], row["plain"][ranks] = answers[0], alone, plain
        share = CpuSeconds.now().since(begin, worked=worked)["other_share"]
        return row | {"other_share": share, "quiet": is_quiet({"other_share": share})}

    def link(self) -> dict[str, float]:
        return self.groups[min(self.groups)].ask("link")[0]

    def shard_bytes(self, ranks: int) -> int:
        return int(4 * self.alone[ranks].ask("shard")["shard_parameters"])


def budget_of(plan: Plan, ranks: int) -> int:
    parameters = Shape(plan.hidden, 2 * plan.hidden, plan.layers, 4, 512).parameters
    return int(SHARE * KINDS_OF_STATE * 4 * parameters / ranks)


@dataclass(frozen=True)
class Inputs:
    """What the model is made of."""

    rates: Rates
    link: dict[str, float]
    works: dict[int, Work]


def rates_of(folder: str) -> Rates:
    """Return what `torch-offload probe` measures."""
    measured = torch_offload.probe(folder, refresh=True)
    return Rates(cores=int(measured.key["cores"]), mixed=measured.ssd_mixed)


def quick_rates(folder: str) -> Rates:
    """Return as much of it as some tenths of a second give."""
    request = ssd_benchmark.Request(directory=Path(folder), file_bytes=16 << 20, block_bytes=1 << 16, seconds=0.02)
    mixed = max(row.mix for row in ssd_benchmark.measure(request).figures)
    return Rates(cores=len(os.sched_getaffinity(0)), mixed=mixed)


def measure(plan: Plan, folder: str, rates: Rates) -> tuple[Inputs, list[dict[str, Any]], bool]:
    """Return the inputs, the rounds, and whether too few of them were quiet."""
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        measured = Measured(plan, folder, stack)
        for _ in range(plan.warmup_steps):
            measured.take_round()
        link = measured.link()
        while not are_enough(rounds, wanted=plan.rounds, most=plan.most_rounds):
            rounds.append(measured.take_round())
            progress(f"{ {ranks: round(step['seconds'], 2) for ranks, step in rounds[-1]['group'].items()} }")
        shards = {ranks: measured.shard_bytes(ranks) for ranks in plan.measured_ranks}
    counted, is_disturbed = usable(rounds, wanted=plan.rounds)
    works = {ranks: work_of(plan, ranks, counted, shard_bytes=shards[ranks]) for ranks in plan.measured_ranks}
    return Inputs(rates, link, works), rounds, is_disturbed


def work_of(plan: Plan, ranks: int, rounds: Sequence[dict[str, Any]], *, shard_bytes: int) -> Work:
    paged = [step for row in rounds for step in row["alone"][ranks]]
    plain = [row["plain"][ranks] for row in rounds]
    sizes = {"layers": plan.layers, "shard_bytes": shard_bytes, "budget_bytes": budget_of(plan, ranks)}
    return Work.of_steps(ranks, paged, plain, **sizes)


def validation(plan: Plan, inputs: Inputs, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each measured count of ranks what their steps took, and what the model says; all on one machine."""
    counted, _ = usable(rounds, wanted=plan.rounds)
    found = []
    for ranks, work in inputs.works.items():
        seconds = spread([row["group"][ranks]["seconds"] for row in counted])
        step = steps_of(inputs, work, ranks, on_host=ranks, tail_of=0, steps=plan.compared_steps)
        error = step["step_seconds"] / seconds["median"] - 1
        found.append({"ranks": ranks, "measured_seconds": seconds, "model": step, "error": error})
        progress(f"{ranks} ranks: {seconds['median']:.2f} s measured, {step['step_seconds']:.2f} s simulated")
    return found


def steps_of(inputs: Inputs, work: Work, ranks: int, *, on_host: int, tail_of: int, steps: int) -> dict[str, Any]:
    """Return what the model says of the steps of `ranks`; with `tail_of` ranks, their margin is that of so many."""
    policy = work.policy(inputs.rates, tail_of=tail_of)
    host, times = work.host(inputs.rates, on_host), work.read_times(inputs.rates)
    stages = work.stages(inputs.link)
    found = simulate(ranks, host, stages, times, policy, steps=steps, seed=SEED)
    ahead_bytes = found.most_pages_ahead * work.page_bytes
    return {
        "simulated": True,
        "step_seconds": median(found.step_seconds),
        "steps": len(found.step_seconds),
        "seconds_by_cause": found.seconds_by_cause,
        "margin_seconds": policy.margin_seconds,
        "share_of_budget_ahead": ahead_bytes / work.budget_bytes,
    }


# --- The model beyond them -------------------------------------------------------------------------------------------


def simulated(plan: Plan, inputs: Inputs) -> list[dict[str, Any]]:
    """Return what the model says of each count of ranks, two to a machine, without and with a margin for the tail.

    Each rank does what one of two does, and gets as many bytes from others: what grows is for how many it waits.
    """
    work = inputs.works[RANKS_OF_HOST]
    found = []
    for ranks in plan.simulated_ranks:
        row: dict[str, Any] = {"simulated": True, "ranks": ranks}
        for name, tail_of in (("today", 0), ("tail_margin", ranks)):
            step = steps_of(inputs, work, ranks, on_host=RANKS_OF_HOST, tail_of=tail_of, steps=plan.simulated_steps)
            first = found[0][name]["step_seconds"] if found else step["step_seconds"]
            row[name] = step | {"over_two_ranks": step["step_seconds"] / first}
        row["gain_of_margin"] = row["today"]["step_seconds"] / row["tail_margin"]["step_seconds"]
        found.append(row)
        ratios = [round(row[name]["over_two_ranks"], 3) for name in ("today", "tail_margin")]
        progress(f"simulated, {ranks} ranks: a step of {ratios} times that of two")
    return found


def described(inputs: Inputs) -> dict[str, Any]:
    """Return what the model was made of, the distribution of reads and its extrapolation included."""
    works = {}
    for ranks, work in inputs.works.items():
        times = work.read_times(inputs.rates)
        works[ranks] = {
            "paged": work.paged,
            "plain": work.plain,
            "page_bytes": work.page_bytes,
            "budget_bytes": work.budget_bytes,
            "host": asdict(work.host(inputs.rates, ranks)),
            "read_times": work.reads,
            "tail": {
                "from_quantile": TAIL_FROM,
                "seconds": times.tail_seconds,
                "exponent": times.tail_exponent,
                "reads_recorded": sum(count for *_, count in work.reads),
            },
        }
    return {
        "rates": asdict(inputs.rates),
        "link": inputs.link,
        "works": works,
        "late_reads": f"one in {STEPS_TO_A_LATE_READ} steps of all ranks",
    }


# --- All of it -------------------------------------------------------------------------------------------------------


def count_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    named = {
        "error_of_bytes": "bytes beside the best eviction",
        "error_of_states": "bytes of states beside 8 read and 8 written",
        "error_of_peak": "peak beside the best eviction",
    }
    return [
        at_most(f"{text}, error, first of {row['ranks']} ranks", abs(row[name]), MAX_COUNT_ERROR)
        for row in rows
        for name, text in named.items()
    ]


def paging_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge what holds of the smallest model too."""
    peaks = [row["step"]["peak_bytes"] / row["step"]["budget_bytes"] for row in rows]
    return [
        at_most("peak of pages over the budget of one rank of many", max(peaks), 1),
        at_most("faults of one rank of many", sum(row["step"]["faults"] for row in rows), 0),
    ]


def model_bars(compared: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = rows[-1]
    what = f"{last['ranks']} ranks, simulated, with a margin for the tail"
    return [
        *(
            at_most(f"error of the model's step, {row['ranks']} ranks", abs(row["error"]), MAX_TIME_ERROR)
            for row in compared
        ),
        at_most(f"step over that of two, {what}", last["tail_margin"]["over_two_ranks"], MAX_RATIO),
        at_most(
            f"share of the budget read ahead, {what}", last["tail_margin"]["share_of_budget_ahead"], MAX_SHARE_AHEAD
        ),
    ]


def main() -> None:
    parser = driver_parser(__doc__, smoke="tiny models, few ranks")
    options = parser.parse_args()
    end_cleanly_on_signals()
    plan = SMOKE if options.smoke else Plan()
    with tempfile.TemporaryDirectory(dir=Path(options.ssd).resolve()) as folder:
        counted = one_of_many(plan, folder)
        inputs, rounds, is_disturbed = measure(plan, folder, quick_rates(folder) if options.smoke else rates_of(folder))
    compared, rows = validation(plan, inputs, rounds), simulated(plan, inputs)
    bars = paging_bars(counted) + ([] if options.smoke else count_bars(counted) + model_bars(compared, rows))
    result = {
        "benchmark": "scale",
        "machine": machine(options.ssd),
        "plan": asdict(plan),
        "one_of_many": counted,
        "inputs": described(inputs),
        "validation": compared,
        "simulated": rows,
        "disturbed": is_disturbed,
        "rounds": rounds,
        "bars": bars,
    }
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
