"""How long a paged training step takes beside plain torch's, and how far it is from what binds it.

    python benchmarks/train_step.py --json > benchmarks/results/train_step.json     (some 40 minutes)
    python benchmarks/train_step.py --full --json                                   (1 B parameters; hours)
    python benchmarks/train_step.py --smoke

A random-init Llama: fp32 with stock fused AdamW, bf16 with torch_offload.AdamW, which keeps fp32 masters. The variants
live in processes of their own and take turns step by step, plain torch once as it is and once with huge pages, which
the pager's frames have; between turns the raw disk is probed. A round in which
somebody else took more than a tenth of the machine's CPU during a step is discarded, up to a limit; figures are medians
over the rounds that are left, ratios medians of the ratios within a round. What binds a step of few tokens is the later
of two: computing with the interference of its traffic, measured beforehand in this run, and the bytes over the probed
bandwidth. The least SSD traffic comes from the engine's own list of uses, replayed (replay.py).
"""

import tempfile
from dataclasses import asdict, replace
from typing import Any

import interference
from harness.disk import DiskProbe, seconds_at_disk_rate
from harness.options import driver_parser
from harness.process_memory import PLAIN_HUGE
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Round, Workers
from harness.worker_process import WorkerProcess, worker_command
from models.workloads import LARGE, SMOKE, USUAL, Plan, VariantPlan, Workload, with_each_activations
from optimum import optimum

MAX_RESIDENT_RATIO = 1.02
MAX_QUARTER_RATIO = 1.10
MIN_SHARE_OF_LIMIT = 0.85
MAX_OVER_OPTIMUM = 1.05
MAX_CLIPPING_RATIO = 1.03
MAX_BYTES_IN_BACKWARD = 17  # of SSD traffic per parameter and step, of which 16 are needed at a quarter of the state
MAX_ACTIVATIONS_RATIO = 1.02  # of activations that may leave memory, over those that stay
TOKENS_BOUND_BY_DISK = 128
MIN_IN_HUGE_PAGES = 0.5  # of the state, without which plain_huge is no other than plain


def start(workload: Workload, name: str, variant: VariantPlan, ssd: str) -> WorkerProcess:
    """Start the process of a variant; its model is built when this returns."""
    options = workload.step_options(
        max_grad_norm=variant.max_grad_norm,
        budget_bytes=int(variant.budget_share * workload.state_bytes),
        ssd=ssd,
        **({"activations": variant.activations} if variant.activations else {}),
        **({"update": variant.update} if variant.update else {}),
    )
    environment = PLAIN_HUGE if variant.in_huge_pages else {}
    return WorkerProcess(name, [*worker_command("step"), *options], log_directory=ssd, **environment)


def measure(
    workload: Workload, variants: dict[str, VariantPlan], plan: Plan, price: dict[str, Any], ssd: str
) -> dict[str, Any]:
    """Run one workload; return the rounds and what they come to."""
    progress(workload.name)
    probe = DiskProbe(ssd, probe_bytes=plan.probe_bytes)
    with Workers() as workers:
        for name, variant in variants.items():
            workers[name] = start(workload, name, variant, ssd)
        workers.warm_up(plan.warmup)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        replays = {name: worker.ask("replay") for name, worker in workers.items()}
        final = workers.finish()
    used, is_disturbed = usable(rounds, wanted=plan.rounds)
    description = workers["plain"].description
    result: dict[str, Any] = {"workload": asdict(workload), "description": description, "disturbed": is_disturbed}
    result["disk"] = {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]}
    result["variants"] = {}
    for name, variant in variants.items():
        final[name].pop("package", None)  # a path of this machine; a plain worker has none
        summary = summarise(name, used) | {"final": final[name]}
        if variant.budget_share:
            summary |= {"limit": against_limit(name, used, price), "traffic": replays[name]}
            least = optimum(
                description["part_elements"], variant.budget_share * workload.state_bytes, dtype=workload.dtype
            )
            summary["floor_bytes_without_activations"] = sum(least)
        result["variants"][name] = summary
    return result | {"rounds": rounds}


def summarise(name: str, rounds: list[Round]) -> dict[str, Any]:
    steps = [row["steps"][name] for row in rounds]
    numbers = [key for key, value in steps[0].items() if isinstance(value, (int, float))]
    return {"ratio_to_plain": ratios(rounds, name, "plain")} | {key: spread([s[key] for s in steps]) for key in numbers}


def ratios(rounds: list[Round], name: str, base: str) -> dict[str, float]:
    return spread([row["steps"][name]["seconds"] / row["steps"][base]["seconds"] for row in rounds])


def against_limit(name: str, rounds: list[Round], price: dict[str, Any]) -> dict[str, Any]:
    """Put each step beside what binds it: computing under its own traffic, or the disk.

    ``share_by_phase`` has the sum of two such limits below the line. Updates wait for the forward that uses the
    weights, since a clipped step is not known before its backward has ended, so most bytes of a step have to move
    while its forward and its updates are computed.
    """
    rows = []
    for row in rounds:
        step, plain = row["steps"][name], row["steps"]["plain"]
        read, written = step["ssd_read_bytes"], step["ssd_written_bytes"]
        forward_read, forward_written = step["ssd_read_bytes_forward"], step["ssd_written_bytes_forward"]
        computing, moving = phase_limit(price, row["disk"], plain["seconds"], read, written)
        forward = phase_limit(
            price, row["disk"], plain["seconds"] - plain["backward_seconds"], forward_read, forward_written
        )
        backward = phase_limit(
            price, row["disk"], plain["backward_seconds"], read - forward_read, written - forward_written
        )
        rows.append(
            {
                "computing_seconds": computing,
                "moving_seconds": moving,
                "share": max(computing, moving) / step["seconds"],
                "share_by_phase": (max(forward) + max(backward)) / step["seconds"],
            }
        )
    return {key: spread([row[key] for row in rows]) for key in rows[0]}


def phase_limit(
    price: dict[str, Any], disk: dict[str, float], seconds: float, read: float, written: float
) -> tuple[float, float]:
    """Return the seconds of a computation under its own traffic, and those of the traffic at the disk's rate.

    The rate is the best of three measured in this run: the disk's just before the step, each direction beside a
    computation, or the mix beside a computation.
    """
    lost = interference.interference_seconds(price, read_bytes=read, written_bytes=written)
    probed = seconds_at_disk_rate(disk, read_bytes=read, written_bytes=written)
    rates = {way: price[way]["bytes_per_second"]["max"] for way in interference.DIRECTIONS}
    apart = read / rates["read"] + written / rates["write"]
    return seconds + lost, min(probed, apart, (read + written) / rates["mix"])


def bars_of(result: dict[str, Any], *, is_timed: bool) -> list[dict[str, Any]]:
    """Return what must hold; ratios of step times only where steps are long enough to have some."""
    bars = timed_bars(result) if is_timed else []
    label = result["workload"]["name"]
    plain = result["variants"]["plain"]
    for name, variant in result["variants"].items():
        if name == "plain":
            continue
        if report := variant["final"].get("report"):  # of a paged one
            peak = report["host_peak_bytes"] / report["budget_bytes"]
            bars.append(at_most(f"{name} peak over budget, {label}", peak, 1))
        if name != "quarter_clipped":  # the plain variant does not clip
            differing = sum(row["steps"][name]["loss"] != row["steps"]["plain"]["loss"] for row in result["rounds"])
            differing += variant["final"]["weights_sha256"] != plain["final"]["weights_sha256"]
            bars.append(at_most(f"{name} losses and weights that differ from plain, {label}", differing, 0))
    return bars


def timed_bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    label, variants = result["workload"]["name"], result["variants"]
    tokens = result["workload"]["batch"] * result["workload"]["sequence"]
    used, _ = usable(result["rounds"], wanted=len(result["rounds"]))
    bars = []
    if "resident" in variants:
        ratio = variants["resident"]["ratio_to_plain"]["median"]
        bars.append(at_most(f"resident step over plain step, {label}", ratio, MAX_RESIDENT_RATIO))
    if "quarter" in variants and tokens > TOKENS_BOUND_BY_DISK:
        ratio = variants["quarter"]["ratio_to_plain"]["median"]
        bars.append(at_most(f"quarter step over plain step, {label}", ratio, MAX_QUARTER_RATIO))
    if "quarter" in variants and tokens <= TOKENS_BOUND_BY_DISK:
        share = variants["quarter"]["limit"]["share"]["median"]
        bars.append(at_least(f"quarter share of what binds it, {label}", share, MIN_SHARE_OF_LIMIT))
        by_phase = variants["quarter"]["limit"]["share_by_phase"]["median"]
        bars.append(at_least(f"quarter share of what binds its phases, {label}", by_phase, MIN_SHARE_OF_LIMIT))
    if "quarter" in variants:
        excess = over_optimum(variants["quarter"])
        bars.append(at_most(f"quarter SSD bytes over the optimum, {label}", excess, MAX_OVER_OPTIMUM))
        moved = moved_bytes(variants["quarter"]) / variants["quarter"]["floor_bytes_without_activations"]
        bars.append(at_most(f"quarter SSD bytes over the floor without activations, {label}", moved, MAX_OVER_OPTIMUM))
    if "plain_huge" in variants:
        bars += huge_page_bars(result, used)
    for name, base in ((name, name.replace("_page", "_keep")) for name in variants if name.endswith("_page")):
        if base in variants:
            ratio = ratios(used, name, base)["median"]
            bars.append(at_most(f"{name} step over {base} step, {label}", ratio, MAX_ACTIVATIONS_RATIO))
            to_plain = ratios(used, name, "plain")["median"]
            most = MAX_RESIDENT_RATIO if name.startswith("resident") else MAX_QUARTER_RATIO
            bars.append(at_most(f"{name} step over plain step, {label}", to_plain, most))
    if "quarter_in_backward" in variants:
        moved = moved_bytes(variants["quarter_in_backward"]) / result["description"]["parameters"]
        bars.append(at_most(f"quarter_in_backward SSD bytes per parameter, {label}", moved, MAX_BYTES_IN_BACKWARD))
        ratio = ratios(used, "quarter_in_backward", "quarter")["median"]
        bars.append(at_most(f"quarter_in_backward step over quarter step, {label}", ratio, 1))
    if "quarter_clipped" in variants:
        ratio = ratios(used, "quarter_clipped", "quarter")["median"]
        bars.append(at_most(f"clipped step over unclipped step, {label}", ratio, MAX_CLIPPING_RATIO))
    return bars


def huge_page_bars(result: dict[str, Any], rounds: list[Round]) -> list[dict[str, Any]]:
    """Judge ours beside plain torch that has huge pages as well, and whether it had them."""
    label, variants = result["workload"]["name"], result["variants"]
    in_huge_pages = variants["plain_huge"]["huge_page_bytes"]["min"] / result["description"]["state_bytes"]
    bars = [at_least(f"plain_huge memory in huge pages over its state, {label}", in_huge_pages, MIN_IN_HUGE_PAGES)]
    tokens = result["workload"]["batch"] * result["workload"]["sequence"]
    for name, most in (("resident", MAX_RESIDENT_RATIO), ("quarter", MAX_QUARTER_RATIO)):
        if name in variants and (name == "resident" or tokens > TOKENS_BOUND_BY_DISK):
            ratio = ratios(rounds, name, "plain_huge")["median"]
            bars.append(at_most(f"{name} step over plain_huge step, {label}", ratio, most))
    return bars


def moved_bytes(variant: dict[str, Any]) -> float:
    """Return what the median step moved to and from the SSD."""
    return float(variant["ssd_read_bytes"]["median"] + variant["ssd_written_bytes"]["median"])


def over_optimum(variant: dict[str, Any]) -> float:
    """Return the bytes of the median step as a share of what the replayed steps had needed."""
    return moved_bytes(variant) / (variant["traffic"]["least_read_bytes"] + variant["traffic"]["least_written_bytes"])


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="about 1 B parameters; needs 24 GiB")
    parser.add_argument("--only", default="", help="workloads whose name contains this, such as 'fp32, 128'")
    parser.add_argument(
        "--activations",
        metavar="MODE",
        nargs="+",
        help="compare these modes of Config.activations, each beside plain torch, instead of the package's default",
    )
    parser.add_argument("--rounds", type=int, help="quiet rounds to measure; default: 5")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else LARGE if options.full else USUAL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    chosen = [entry for entry in plan.workloads if options.only in entry[0].name]
    if not chosen:
        parser.error(f"no workload is called {options.only!r}; there are: {[w.name for w, _ in plan.workloads]}")
    if options.activations:
        chosen = [(workload, with_each_activations(variants, options.activations)) for workload, variants in chosen]
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        price = interference.interference(scratch, interference.SMOKE if options.smoke else interference.Plan())
        results = [measure(workload, variants, plan, price, scratch) for workload, variants in chosen]
    bars = [bar for result in results for bar in bars_of(result, is_timed=not options.smoke)]
    benchmark = {
        "benchmark": "train_step",
        "machine": machine(options.ssd),
        "interference": price,
        "workloads": results,
    }
    emit(benchmark | {"bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
