"""Do several ranks train with paging as they do in memory: bit for bit, in how much memory, by how many bytes?

    python benchmarks/distributed.py --json --ssd /mnt/nvme > benchmarks/results/distributed.json
    python benchmarks/distributed.py --smoke

A Llama over gloo, one thread a rank, with DDP and with `fully_shard` (FSDP2), in fp32 and computed in bf16.

- **identity**: two and three ranks, every combination of sharding, optimizer, clipping, accumulation and activations:
  losses, norms, weights and states beside those of the same ranks in memory. A rank has 40 % of its state, with DDP its
  gradients and 15 %.
- **traffic**: the bytes of all ranks' scratch files for each parameter and step, at 1, 2 and 4 ranks of FSDP2 that
  share the same memory, beside those of the best eviction of the same uses.
- **store**: the bytes of a step of one to four ranks of FSDP2 whose pages go to one store, as multiples of all weights,
  and the most memory that the store had. Its process runs the updates.
- **store_memory**: what a store reads from its SSD and writes there in a step of one rank, with memory for a part of
  the weights, gradients and states.
- **memory**: four ranks of FSDP2 in one memory group, limited to what four take that train next to nothing, what the
  four may take for pages, and 2 % of that.
- **overhead**: steps of two ranks with everything in memory, beside steps of two that page nothing, in turns.
- **schedules**: pipelines of two and of four ranks by torch's own schedules, in 36 % of a rank's state: bits, bytes of
  a step beside those of a plan, and how many of the deferred updates run while a rank waits for another.
- **collectives**: every collective of torch on two ranks, waited for at once and later, on pages that are away before
  and sent away while it is under way, with random delays: bits.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from harness.machine import CpuSeconds
from harness.memory_group import LimitsUnavailable, MemoryGroup, end_cleanly_on_signals
from harness.options import driver_parser
from harness.page_store import store_process
from harness.provenance import machine
from harness.rank_group import group
from harness.reporting import at_least, at_most, emit, is_quiet, progress, spread, usable
from harness.worker_process import WorkerFailed
from models.bare_llama import Shape

MIN_EQUAL = 120
MAX_RATIO_OF_BYTES = 1.3  # between counts of ranks that share the same memory
MAX_OVER_LEAST = 1.05
MAX_BYTES_OF_STATES = 1.02 * 8  # of each parameter, two moments in fp32
MAX_OVERHEAD = 1.02
MAX_LOOPED_RATIO = 0.5  # bytes of LoopedBFS over those of 1F1B
MAX_OFF_PLAN = 0.1  # bytes of a schedule on few ranks, from those planned
MIN_IN_WAITS = 0.8  # of the deferred updates of a pipeline
# Of what a store receives and sends in a step: gradients; weights for forward and for backward.
MULTIPLES_OF_WEIGHTS = {"written_bytes": 1, "read_bytes": 2}
MAX_OVER_MULTIPLE = 1.01
MAX_SPREAD_OF_PEAK = 0.01  # of the store's memory, between counts of ranks
JUDGED_SHARE = 0.5  # of all that a store has, in its memory
MAX_READ_OVER_LACKING = 1.25  # of a store with so much memory, over what that has no room for
LIMIT_TOLERANCE = 1.02  # of what all ranks may take for pages
SHARE = 0.4
KINDS_OF_STATE = 4
RESIDENT_BUDGET_BYTES = 4 << 30
NO_LIMIT_BYTES = 1 << 40
SMALLEST_HIDDEN = 16
PAGE_ELEMENTS_OF_MEMORY = 1 << 16  # smaller pages, as the other parts have, take more of the system's own memory
SMALLEST_BUDGET_BYTES = 4 << 20


@dataclass(frozen=True)
class Plan:
    """How much is trained, how often."""

    hidden: int = 128
    layers: int = 20
    rows: int = 2
    tokens: int = 64
    every: int = 1
    compared_ranks: tuple[int, ...] = (2, 3)
    traffic_hidden: int = 512
    traffic_ranks: tuple[int, ...] = (1, 2, 4)
    store_ranks: tuple[int, ...] = (1, 2, 3, 4)
    store_steps: int = 5
    store_hidden: int = 256
    store_layers: int = 40
    store_rank_bytes: int = 20 << 20  # most of which layers take that are gathered, for any count of ranks
    store_budget_bytes: int = 32 << 20
    store_shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    limited_ranks: int = 4
    limited_steps: int = 12
    pipeline_ranks: tuple[int, ...] = (2, 4)
    pipeline_layers: int = 16
    pipeline_width: int = 256
    micro_batches: int = 8
    pipeline_steps: int = 3
    repeated_collectives: int = 200
    warmup_steps: int = 3
    rounds: int = 9
    steps_of_round: int = 3


SMOKE = Plan(
    hidden=128, layers=10, rows=1, tokens=16, every=29, compared_ranks=(2,), traffic_hidden=128, traffic_ranks=(1, 2),
    store_ranks=(1, 2), store_steps=1, store_hidden=128, store_layers=10, store_rank_bytes=4 << 20,
    store_budget_bytes=4 << 20, store_shares=(0.5,),
    limited_ranks=2, limited_steps=2, pipeline_ranks=(2,), pipeline_layers=8, pipeline_width=128, pipeline_steps=1,
    repeated_collectives=3, warmup_steps=1, rounds=1, steps_of_round=1,
)  # fmt: skip


def sizes(plan: Plan, hidden: int) -> dict[str, int]:
    return {"hidden": hidden, "layers": plan.layers, "rows": plan.rows, "tokens": plan.tokens}


def identity(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return what each combination was on its ranks together."""
    found = []
    for ranks in plan.compared_ranks:
        with group(f"identity{ranks}", folder, ranks, every=plan.every, **sizes(plan, plan.hidden)) as compared:
            for _ in range(compared.workers[0].description["cases"]):
                answers = compared.ask("compare")
                row = {
                    "ranks": ranks,
                    **answers[0]["case"],
                    "is_equal": all(answer["is_equal"] for answer in answers),
                    "compared_tensors": min(answer["digests"] for answer in answers),
                    "faults": sum(answer["faults"] for answer in answers),
                    "least_evictions": min(answer["evictions"] for answer in answers),
                    "peak_over_budget": max(answer["peak_bytes"] / answer["budget_bytes"] for answer in answers),
                }
                found.append(row)
                progress(f"{ranks} ranks, {answers[0]['case']}: {'equal' if row['is_equal'] else 'DIFFERENT'}")
    return found


def shape_of(hidden: int, layers: int) -> Shape:
    return Shape(hidden, 2 * hidden, layers, 4, 512)


def parameters_of(plan: Plan) -> int:
    return shape_of(plan.traffic_hidden, plan.layers).parameters


def budget_of_rank(plan: Plan, ranks: int) -> int:
    return int(SHARE * KINDS_OF_STATE * 4 * parameters_of(plan) / ranks)


def traffic(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return the bytes of a step for each count of ranks."""
    shape = sizes(plan, plan.traffic_hidden)
    found = []
    for ranks in plan.traffic_ranks:
        parameters, budget = parameters_of(plan), budget_of_rank(plan, ranks)
        with group(f"traffic{ranks}", folder, ranks, train="paged", budget_bytes=budget, **shape) as trained:
            for _ in range(plan.warmup_steps):
                trained.ask("step")
            steps = [trained.ask("step") for _ in range(plan.rounds)]
            replayed = trained.ask("replay")
        counted = [{name: sum(answer[name] for answer in step) / parameters for name in step[0]} for step in steps]
        moved = {name: spread([step[name] for step in counted]) for name in ("read_bytes", "written_bytes")}
        by_kind = {name: spread([step[name] for step in counted]) for name in counted[0] if "_bytes_of_" in name}
        found.append(
            {
                "ranks": ranks,
                "budget_bytes": budget,
                "parameters": parameters,
                "bytes_per_parameter": moved,
                "bytes_per_parameter_by_kind": {name: each for name, each in by_kind.items() if each["max"] > 0},
                "replayed": {name: sum(answer[name] for answer in replayed) for name in replayed[0]},
            }
        )
        progress(f"{ranks} ranks: {moved['read_bytes']['median']:.1f} read, {moved['written_bytes']['median']:.1f} B")
    return found


def traffic_bars(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge the bytes of one count of ranks beside a replay, and those of two moments beside once each way."""
    ranks, replayed, kinds = row["ranks"], row["replayed"], row["bytes_per_parameter_by_kind"]
    over_least = replayed["moved_bytes"] / replayed["least_bytes"]
    most = max(kinds[f"{way}_bytes_of_state"]["median"] for way in ("read", "written"))
    return [
        at_most(f"bytes of {ranks} ranks over the least by replay", over_least, MAX_OVER_LEAST),
        at_most(f"bytes of states for each parameter, one way, {ranks} ranks", most, MAX_BYTES_OF_STATES),
    ]


def stored_weights_bytes(plan: Plan) -> int:
    return 4 * shape_of(plan.store_hidden, plan.store_layers).parameters


def train_over_store(
    plan: Plan, folder: str, ranks: int, *, budget_bytes: int, steps: int
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Return what each rank answered to each step after those to warm up, and what the store says at its end."""
    shape = sizes(plan, plan.store_hidden) | {"layers": plan.store_layers, "rows": 1, "tokens": 16}
    options = {"train": "paged", "budget_bytes": plan.store_rank_bytes, "activations": "keep", **shape}
    with store_process(folder, ram=str(budget_bytes)) as served:
        with group(f"store{ranks}", folder, ranks, store=served.address, **options) as trained:
            for _ in range(plan.warmup_steps):
                trained.ask("step")
            answers = [trained.ask("step") for _ in range(steps)]
        return answers, served.end()


def store(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return what one store received and sent in a step, and had in memory, for each count of ranks."""
    weights_bytes = stored_weights_bytes(plan)
    found = []
    for ranks in plan.store_ranks:
        limits = {"budget_bytes": plan.store_budget_bytes, "steps": plan.store_steps}
        steps, there = train_over_store(plan, folder, ranks, **limits)
        multiples = {
            name: spread([sum(answer[name] for answer in step) / weights_bytes for step in steps])
            for name in MULTIPLES_OF_WEIGHTS
        }
        states = sum(
            answer[f"{way}_bytes_of_state"] for step in steps for answer in step for way in ("read", "written")
        )
        found.append(
            {
                "ranks": ranks,
                "weights_bytes": weights_bytes,
                "steps": plan.warmup_steps + plan.store_steps,
                "over_weights": multiples,
                "bytes_of_states": states,
                "store": there,
            }
        )
        progress(
            f"{ranks} ranks: a store received {multiples['written_bytes']['median']:.3f} and sent "
            f"{multiples['read_bytes']['median']:.3f} times the weights, peak {there['peak_bytes'] / 1e6:.1f} MB"
        )
    return found


def store_memory(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return what a store moved to and from its SSD in a step, for each part of all that it has in memory."""
    needed_bytes = KINDS_OF_STATE * stored_weights_bytes(plan)
    found = []
    for share in plan.store_shares:
        budget_bytes = int(share * needed_bytes)
        few, many = (
            train_over_store(plan, folder, 1, budget_bytes=budget_bytes, steps=steps)[1]
            for steps in (0, plan.store_steps)
        )
        moved = {name: (many[name] - few[name]) / plan.store_steps for name in ("ssd_read_bytes", "ssd_written_bytes")}
        lacking_bytes = needed_bytes - budget_bytes
        row = {"share": share, "budget_bytes": budget_bytes, "needed_bytes": needed_bytes, **moved}
        found.append(row | {"read_over_lacking": moved["ssd_read_bytes"] / lacking_bytes})
        ratios = [round(part / needed_bytes, 3) for part in moved.values()]
        progress(f"{share} of all in a store's memory: {ratios} of all read and written in a step on its SSD")
    return found


def store_memory_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    what = "bytes that a store reads from its SSD in a step over those that its memory has no room for, half of all"
    return [
        at_most(what, row["read_over_lacking"], MAX_READ_OVER_LACKING) for row in rows if row["share"] == JUDGED_SHARE
    ]


def store_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    most = {name: max(row["over_weights"][name]["max"] for row in rows) for name in MULTIPLES_OF_WEIGHTS}
    least = {name: min(row["over_weights"][name]["min"] for row in rows) for name in MULTIPLES_OF_WEIGHTS}
    wrong = sum(
        round(extreme[name]) != multiple for name, multiple in MULTIPLES_OF_WEIGHTS.items() for extreme in (least, most)
    )
    in_all = max(row["store"]["received_bytes"] / row["weights_bytes"] / (row["steps"] + 1) for row in rows)
    peaks = [row["store"]["peak_bytes"] for row in rows]
    spread_of_peak = (max(peaks) - min(peaks)) / rows[0]["store"]["budget_bytes"]
    return [
        at_most("extremes of a step's bytes at a store that are not the weights once and twice", wrong, 0),
        *(
            at_most(
                f"{name} of a step at a store over {multiple} times the weights",
                most[name] / multiple,
                MAX_OVER_MULTIPLE,
            )
            for name, multiple in MULTIPLES_OF_WEIGHTS.items()
        ),
        at_most(
            "bytes received in all over the weights once and the gradients of each step", in_all, MAX_OVER_MULTIPLE
        ),
        at_most("bytes of states to and from a store", sum(row["bytes_of_states"] for row in rows), 0),
        at_most("spread of a store's peak over its memory, 1 to 4 ranks", spread_of_peak, MAX_SPREAD_OF_PEAK),
    ]


def memory(plan: Plan, folder: str) -> dict[str, Any]:
    """Train in a memory group that has room for the budgets of all ranks and for what they take without a model."""
    ranks, shape = plan.limited_ranks, sizes(plan, plan.traffic_hidden)
    smallest = shape | {"hidden": SMALLEST_HIDDEN}
    base_bytes = run_limited("base", folder, NO_LIMIT_BYTES, ranks, 2, budget_bytes=SMALLEST_BUDGET_BYTES, **smallest)
    budget, shape["page_elements"] = budget_of_rank(plan, ranks), PAGE_ELEMENTS_OF_MEMORY
    limit_bytes = base_bytes["group_peak_bytes"] + int(LIMIT_TOLERANCE * ranks * budget)
    found = run_limited("limited", folder, limit_bytes, ranks, plan.limited_steps, budget_bytes=budget, **shape)
    progress(f"{ranks} ranks: {found['group_peak_bytes'] >> 20} of {limit_bytes >> 20} MiB, killed: {found['failure']}")
    return {"base": base_bytes, "limit_bytes": limit_bytes, "node_budget_bytes": ranks * budget, **found}


def run_limited(name: str, folder: str, limit_bytes: int, ranks: int, steps: int, **options: Any) -> dict[str, Any]:
    """Train within a limit that the system enforces."""
    limit = MemoryGroup(name, limit_bytes, may_swap=False)
    answers: list[dict[str, Any]] = []
    failure = None
    try:
        with group(name, folder, ranks, limit=limit, device="meta", train="paged", **options) as trained:
            for _ in range(steps):
                answers += trained.ask("step")
    except WorkerFailed as error:
        failure = str(error)
    finally:
        peak_bytes = limit.peak_bytes()
        limit.remove()
    return {
        "steps": len(answers) // ranks,
        "failure": failure,
        "group_peak_bytes": peak_bytes,
        "peak_over_budget": max((each["peak_bytes"] / each["budget_bytes"] for each in answers), default=None),
        "moved_bytes": sum(each["read_bytes"] + each["written_bytes"] for each in answers),
    }


def overhead(plan: Plan, folder: str) -> dict[str, Any]:
    """Let two ranks in memory and two whose engine has room for everything take turns."""
    shape = sizes(plan, plan.traffic_hidden)
    rounds = []
    with (
        group("plain", folder, 2, train="plain", **shape) as plain,
        group("resident", folder, 2, train="paged", budget_bytes=RESIDENT_BUDGET_BYTES, **shape) as resident,
    ):
        for each in (plain, resident):
            for _ in range(plan.warmup_steps):
                each.ask("step")
        for _ in range(plan.rounds):
            begin = CpuSeconds.now()
            steps = [[each.ask("step") for _ in range(plan.steps_of_round)] for each in (plain, resident)]
            worked = sum(answer["cpu_seconds"] for turns in steps for answers in turns for answer in answers)
            others = {"other_share": CpuSeconds.now().since(begin, worked=worked)["other_share"]}
            seconds = [min(answers[0]["seconds"] for answers in turns) for turns in steps]
            rounds.append({"seconds": seconds, "ratio": seconds[1] / seconds[0], **others, "quiet": is_quiet(others)})
    counted, is_disturbed = usable(rounds, wanted=plan.rounds)
    return {"ratio": spread([row["ratio"] for row in counted]), "disturbed": is_disturbed, "rounds": rounds}


def schedules(plan: Plan, folder: str) -> list[dict[str, Any]]:
    """Return what each schedule moves in a step, as a multiple of the weights of all stages."""
    return [row for ranks in plan.pipeline_ranks for row in pipeline(plan, folder, ranks)]


def pipeline(plan: Plan, folder: str, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield what each schedule was on all ranks together."""
    options = {
        "layers": plan.pipeline_layers,
        "width": plan.pipeline_width,
        "micro_batches": plan.micro_batches,
        "steps": plan.pipeline_steps,
        "warmup": plan.warmup_steps,
    }
    with group(f"stages{ranks}", folder, ranks, worker="stages", **options) as stages:
        for _ in range(stages.workers[0].description["schedules"]):
            answers = stages.ask("compare")
            counted = {name: sum(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]}
            updates, updates_in_waits = counted.pop("applied_pages"), counted.pop("updates_in_rank_waits")
            weights_bytes = sum(answer["weights_bytes"] for answer in answers)
            moved = {name: total / weights_bytes for name, total in counted.items()}
            planned = {name: sum(answer["planned"][name] for answer in answers) / weights_bytes for name in moved}
            row = {
                "ranks": ranks,
                "schedule": answers[0]["schedule"],
                "stages": answers[0]["stages"],
                "is_equal": all(answer["is_equal"] for answer in answers),
                "faults": sum(answer["faults"] for answer in answers),
                "least_evictions": min(answer["evictions"] for answer in answers),
                "peak_over_budget": max(answer["peak_bytes"] / answer["budget_bytes"] for answer in answers),
                "moved_over_weights": moved,
                "all_moved_over_weights": sum(moved.values()),
                "planned_over_weights": planned,
                "all_planned_over_weights": sum(planned.values()),
                "updates_in_rank_waits": updates_in_waits / updates,
            }
            bytes_of_step = f"{row['all_moved_over_weights']:.2f} times the weights a step"
            progress(
                f"{ranks} ranks, {row['schedule']}: {bytes_of_step}, planned {row['all_planned_over_weights']:.2f}"
            )
            yield row


def schedule_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {(row["ranks"], row["schedule"]): row for row in rows}
    few, many = min(row["ranks"] for row in rows), max(row["ranks"] for row in rows)
    moved = [found[few, name]["all_moved_over_weights"] for name in ("LoopedBFS", "1F1B")]
    updates = found[many, "1F1B"]["updates_in_rank_waits"]
    off_plan = [
        abs(row["all_planned_over_weights"] / row["all_moved_over_weights"] - 1) for row in rows if row["ranks"] == few
    ]
    return [
        at_most(f"bytes of LoopedBFS over those of 1F1B, {few} ranks", moved[0] / moved[1], MAX_LOOPED_RATIO),
        at_most(
            f"part by which the bytes of a schedule differ from its plan, {few} ranks", max(off_plan), MAX_OFF_PLAN
        ),
        at_least(f"share of deferred updates while {many} ranks of 1F1B wait for one another", updates, MIN_IN_WAITS),
    ]


def collectives(plan: Plan, folder: str) -> dict[str, Any]:
    """Return what every collective of two ranks was, called on pages that were away and were sent away at once."""
    rows = []
    with group("collectives", folder, 2, worker="collectives", repeats=plan.repeated_collectives) as exercised:
        description = exercised.workers[0].description
        for _ in range(description["cases"]):
            answers = exercised.ask("exercise")
            row = {
                "operator": answers[0]["operator"],
                "is_async": answers[0]["is_async"],
                "called": any(answer["called"] for answer in answers),
                **{name: sum(answer[name] for answer in answers) for name in ("runs", "different", "stayed")},
            }
            rows.append(row)
            progress(f"{row['operator']}: {row['different']} of {row['runs']} differ, in use {row['stayed']}")
    figures = {name: sum(answer[name] for answer in answers) for name in ("faults", "evictions", "misses")}
    return {"rows": rows, "not_exercised": description["not_exercised"], **figures}


def collectives_bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = found["rows"]
    later = [row["stayed"] for row in rows if row["is_async"]]
    return [
        at_most("runs of collectives that differ from those in memory", sum(row["different"] for row in rows), 0),
        at_most("faults in all collectives", found["faults"], 0),
        at_most("collectives of torch that were not called", sum(not row["called"] for row in rows), 0),
        at_most("collectives of torch that are not known", len(found["not_exercised"]), 0),
        at_least("runs in which pages had to stay until the collective had ended", sum(later), 1),
    ]


def paging_bars(what: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    return [
        at_most(f"{what} that differ from the same ranks in memory", sum(not row["is_equal"] for row in rows), 0),
        at_most(f"faults in all {what}", sum(row["faults"] for row in rows), 0),
        at_least(f"fewest evictions on a rank in one of the {what}", min(row["least_evictions"] for row in rows), 1),
        at_most(f"peak of pages over a rank's budget, {what}", max(row["peak_over_budget"] for row in rows), 1),
    ]


def full_bars(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge what a tiny model cannot show."""
    bars = []
    if "identity" in parts:
        equal = sum(row["is_equal"] for row in parts["identity"])
        bars.append(at_least("combinations equal to the same ranks in memory", equal, MIN_EQUAL))
    if "traffic" in parts:
        totals = [sum(part["median"] for part in row["bytes_per_parameter"].values()) for row in parts["traffic"]]
        ratio = max(totals) / min(totals)
        bars.append(at_most("bytes at one count of ranks over those at another", ratio, MAX_RATIO_OF_BYTES))
        bars += [bar for row in parts["traffic"] for bar in traffic_bars(row)]
    bars += store_bars(parts["store"]) if "store" in parts else []
    bars += store_memory_bars(parts["store_memory"]) if "store_memory" in parts else []
    if "memory" in parts:
        found = parts["memory"]
        bars.append(at_least("steps of ranks that one memory group limits", found["steps"], Plan.limited_steps))
    if "overhead" in parts:
        ratio = parts["overhead"]["ratio"]["median"]
        bars.append(at_most("FSDP2 step with all in memory over plain", ratio, MAX_OVERHEAD))
    return [*bars, *(schedule_bars(parts["schedules"]) if "schedules" in parts else [])]


PARTS = {
    "identity": identity,
    "traffic": traffic,
    "store": store,
    "store_memory": store_memory,
    "memory": memory,
    "overhead": overhead,
    "schedules": schedules,
    "collectives": collectives,
}


def main() -> None:
    parser = driver_parser(__doc__, smoke="a tiny model, few combinations")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    options = parser.parse_args()
    end_cleanly_on_signals()
    plan = SMOKE if options.smoke else Plan()
    with tempfile.TemporaryDirectory(dir=options.ssd) as folder:
        parts, missing = {}, [f"{name}: left out" for name in PARTS if name not in options.parts]
        for name in options.parts:
            try:
                parts[name] = PARTS[name](plan, folder)
            except LimitsUnavailable as error:
                missing.append(f"{name}: {error}")
    compared = {"combinations": parts.get("identity", []), "schedules": parts.get("schedules", [])}
    bars = [bar for what, rows in compared.items() for bar in paging_bars(what, rows)]
    bars += collectives_bars(parts["collectives"]) if "collectives" in parts else []
    bars += [] if options.smoke else full_bars(parts)
    result = {"benchmark": "distributed", "machine": machine(options.ssd), "plan": asdict(plan), **parts, "bars": bars}
    emit(result | ({"not_measured": missing} if missing else {}), as_json=options.json)


if __name__ == "__main__":
    main()
