"""How close a step on three tiers is to what binds it, and how well torch_offload.plan predicts it.

    python benchmarks/three_tiers.py --json --ssd /mnt/nvme > benchmarks/results/three_tiers.json    (some 20 minutes)
    python benchmarks/three_tiers.py --smoke

A random-init Llama in fp32 with stock fused AdamW trains on an emulated device above memory above the SSD, with updates
on the host. Device and SSD are slowed down until they stand to this machine's matrix products as the links of a
workstation stand to its RTX 4090: 165 TFLOP/s of dense bf16 [1], 25 GB/s each way of the 32 of PCIe 4.0 x16, 7 GB/s
of an NVMe disk on four such lanes, so 6,600 and 23,600 operations per byte. The scale is this machine's operations per
second over those of the card.

At each point two processes take turns: plain torch, whose step is the computation, and ours. Of every turn the first
step uses up what idle links did meanwhile and does not count. What binds a step is the longest of the computation and
of the bytes of each link over its rate. Every loss and the final weights must equal plain torch's. The prediction is
made once per point, before its rounds, from the machine's rates and the model's configuration. A round in which
somebody else took more than a tenth of the machine's CPU is discarded, up to a limit.

[1] NVIDIA Ada GPU Architecture, white paper, appendix A: FP16 and BF16 tensor with FP32 accumulate.
"""

import functools
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Workers, take_turns
from harness.worker_process import WorkerProcess, option_words, worker_command

CARD_OPERATIONS = 165e12
OPERATIONS_PER_LINK_BYTE = CARD_OPERATIONS / 25e9
OPERATIONS_PER_SSD_BYTE = CARD_OPERATIONS / 7e9
MIN_SHARE_OF_LIMIT = 0.90
MAX_PREDICTION_ERROR = 0.10
COMPUTE, TO_DEVICE, TO_HOST, SSD = "compute", "to device", "to host", "ssd"


@dataclass(frozen=True)
class Point:
    """A model, its tokens per step, and the memory it gets."""

    binding: str
    batch: int
    device_bytes: int
    ram_bytes: int
    measured_steps: int = 2
    sequence: int = 256
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 8
    heads: int = 4
    vocabulary: int = 1024
    checkpointing: int = 1
    page_elements: int = 1 << 14


@dataclass(frozen=True)
class Plan:
    """What is run, and how often."""

    points: tuple[Point, ...]
    rounds: int = 5
    most_rounds: int = 9


USUAL = Plan(
    (
        Point(COMPUTE, batch=12, sequence=1024, device_bytes=560 << 20, ram_bytes=300 << 20, measured_steps=1),
        Point(TO_DEVICE, batch=2, device_bytes=36 << 20, ram_bytes=300 << 20),
        Point(SSD, batch=2, device_bytes=36 << 20, ram_bytes=100 << 20, measured_steps=1),
    )
)
SMOKE_SHAPE = {
    "batch": 2,
    "sequence": 32,
    "hidden": 64,
    "intermediate": 256,
    "vocabulary": 128,
    "page_elements": 1 << 12,
}
SMOKE = Plan(
    (Point(SSD, device_bytes=3 << 20, ram_bytes=5 << 20, measured_steps=1, **SMOKE_SHAPE),), rounds=2, most_rounds=2
)


@dataclass(frozen=True)
class Rates:
    """What the emulated machine carries."""

    operations_per_second: float
    link_bytes_per_second: int
    ssd_bytes_per_second: int

    @classmethod
    def of_this_machine(cls, directory: str) -> "Rates":
        """Return those that keep the card's ratios to this machine's matrix products."""
        import torch_offload

        operations = torch_offload.probe(directory).gemm["float32"]
        return cls(operations, int(operations / OPERATIONS_PER_LINK_BYTE), int(operations / OPERATIONS_PER_SSD_BYTE))


def start(name: str, point: Point, rates: Rates, ssd: str, *extra: str) -> WorkerProcess:
    """Start the process of a variant; its model is built when this returns."""
    shape = {key: value for key, value in asdict(point).items() if key not in ("binding", "ram_bytes")}
    shape |= {"budget_bytes": point.ram_bytes, "ssd": ssd}
    shape |= {"link": rates.link_bytes_per_second, "ssd_rate": rates.ssd_bytes_per_second}
    options = option_words(shape)
    return WorkerProcess(name, [*worker_command("tiers"), *options, *extra], log_directory=ssd)


def shares_of(steps: dict[str, dict[str, Any]], rates: Rates) -> dict[str, float]:
    """Return for which share of our step each resource is busy at least."""
    ours, plain = steps["ours"], steps["plain"]
    busy = {
        COMPUTE: plain["seconds"],
        TO_DEVICE: ours["to_device_bytes"] / rates.link_bytes_per_second,
        TO_HOST: ours["to_host_bytes"] / rates.link_bytes_per_second,
        SSD: (ours["ssd_read_bytes"] + ours["ssd_written_bytes"]) / rates.ssd_bytes_per_second,
    }
    return {name: seconds / ours["seconds"] for name, seconds in busy.items()}


def measure(point: Point, rates: Rates, plan: Plan, ssd: str) -> dict[str, Any]:
    """Predict a step of the point, then take steps."""
    progress(point.binding)
    with Workers() as workers:
        workers["plain"] = start("plain", point, rates, ssd, "--plain")
        prediction = workers["plain"].ask("predict")
        workers["ours"] = start("ours", point, rates, ssd)
        turns = {name: functools.partial(worker.ask, "turn") for name, worker in workers.items()}
        for warm_up in turns.values():
            warm_up()
        rounds = take_turns(turns, wanted=plan.rounds, most=plan.most_rounds)
        final = workers.finish()
    used, is_disturbed = usable(rounds, wanted=plan.rounds)
    seconds = spread([row["steps"]["ours"]["seconds"] for row in used])
    shares = [shares_of(row["steps"], rates) for row in used]
    return {
        "point": asdict(point),
        "disturbed": is_disturbed,
        "seconds": seconds,
        "share_of_limit": spread([max(share.values()) for share in shares]),
        "busy_share": {name: spread([share[name] for share in shares]) for name in shares[0]},
        "bound_by": max(shares[0], key=lambda name: sum(share[name] for share in shares)),
        "predicted_over_measured": prediction["predicted_seconds"] / seconds["median"],
        "prediction": prediction,
        "final": final,
        "rounds": rounds,
    }


def bars_of(result: dict[str, Any], *, is_timed: bool) -> list[dict[str, Any]]:
    """Return what must hold at a point; shares of a limit only where a step is long enough to have some."""
    label = f"{result['point']['binding']}-bound"
    steps = [row["steps"] for row in result["rounds"]]
    final, report = result["final"], result["final"]["ours"]["report"]
    differing = sum(step["ours"]["losses"] != step["plain"]["losses"] for step in steps)
    differing += final["ours"]["weights_sha256"] != final["plain"]["weights_sha256"]
    bars = [
        at_most(f"losses and weights that differ from plain, {label}", differing, 0),
        at_most(
            f"device peak over budget, {label}", report["device"]["peak_bytes"] / report["device"]["budget_bytes"], 1
        ),
        at_most(f"memory peak over budget, {label}", report["host_peak_bytes"] / report["budget_bytes"], 1),
    ]
    if not is_timed:
        return bars
    error = abs(result["predicted_over_measured"] - 1)
    return [
        at_least(f"share of the limit, {label}", result["share_of_limit"]["median"], MIN_SHARE_OF_LIMIT),
        at_most(f"error of the prediction, {label}", error, MAX_PREDICTION_ERROR),
        at_least(f"is bound by what it is called after, {label}", result["bound_by"] == result["point"]["binding"], 1),
        *bars,
    ]


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--only", default="", help="points bound by what contains this, such as 'ssd'")
    parser.add_argument("--rounds", type=int, help="quiet rounds to measure; default: 5")
    options = parser.parse_args()
    plan = SMOKE if options.smoke else USUAL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    chosen = [point for point in plan.points if options.only in point.binding]
    if not chosen:
        parser.error(f"no point is bound by {options.only!r}; there are: {[point.binding for point in plan.points]}")
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        rates = Rates.of_this_machine(scratch)
        results = [measure(point, rates, plan, scratch) for point in chosen]
    bars = [bar for result in results for bar in bars_of(result, is_timed=not options.smoke)]
    scale = {"scale": rates.operations_per_second / CARD_OPERATIONS, **asdict(rates)}
    emit(
        {"benchmark": "three_tiers", "machine": machine(options.ssd), "rates": scale, "points": results, "bars": bars},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
