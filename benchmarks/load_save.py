"""Loading and saving a model of three times the budget inside a memory-limited group, against the rate of the raw disk.

    python benchmarks/load_save.py --json > benchmarks/results/load_save.json
    python benchmarks/load_save.py --smoke

A random-init Llama is saved once. Every round probes the disk, then a fresh process, limited to its base, the budget
and 2 %, loads the model from a cold cache, wraps it, runs it on one token and saves it. Base is what the same process
peaks at with a model of a few kilobytes. The least time of a phase is what its bytes take at the disk's rate
(harness/disk.py): the file and what pages moved. Each round does so twice: with pages copied out of the checkpoint,
which the rates are of, and with pages that stay in it, which is the default. A round in which somebody else took more
than a tenth of the machine's CPU is dropped, where enough others are left. At the end LoRA adapters are trained over
the same file within the same budget: how large the scratch file becomes in which only they and their moments need room.
"""

import filecmp
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.disk import DiskProbe, seconds_at_disk_rate
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import are_enough, at_least, at_most, emit, is_quiet, spread, usable
from harness.worker_process import WorkerProcess, option_words, worker_command

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "python"))
from support.memory_limits import UNLIMITED, LimitedRun, run_limited  # noqa: E402

SLACK = 1.02
MIN_SHARE = 0.8
FP32_BYTES = 4
RANK = 8
ADAPTER_STEPS = 4
ADAPTER_TOKENS = 64
COPIES_OF_ADAPTERS = 3  # the adapters and their two moments
MOST_OF_SCRATCH_FILE = 1.05  # over those copies
PLAIN_CHECK = """
import sys, torch
from transformers import AutoModelForCausalLM
saved, original = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in sys.argv[1:])
assert "torch_offload" not in sys.modules
print(sum(not torch.equal(saved[name], original[name]) for name in original) + len(saved.keys() ^ original.keys()))
"""
MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder, hidden, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=8 * hidden, hidden_size=hidden, intermediate_size=4 * hidden,
    num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8)).save_pretrained(folder)
"""


@dataclass(frozen=True)
class Plan:
    """How large, how often."""

    hidden: int
    layers: int
    rounds: int
    most_rounds: int
    probe_bytes: int
    page_elements: int  # of training adapters


FULL = Plan(hidden=1024, layers=12, rounds=5, most_rounds=12, probe_bytes=256 << 20, page_elements=1 << 20)
SMOKE = Plan(hidden=256, layers=12, rounds=1, most_rounds=1, probe_bytes=16 << 20, page_elements=1 << 14)
SMALLEST = (64, 1)
MIN_BUDGET_BYTES = 8 << 20
MODEL_OVER_BUDGET = 3


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder), str(hidden), str(layers)], check=True)
    return folder


def load_and_save(
    folder: Path, output: Path, budget_bytes: int, limit_bytes: int = UNLIMITED, *, checkpoint_pages: str = "copy"
) -> LimitedRun:
    arguments = [str(folder), str(output), str(budget_bytes), str(folder.parent), checkpoint_pages]
    return run_limited([*worker_command("load_save"), *arguments], limit_bytes)


def checked(run: LimitedRun) -> LimitedRun:
    if run.status != 0:
        raise SystemExit(f"a worker ended with status {run.status} ({run.kind}):\n{run.errors[-3000:]}")
    return run


def measure_base_bytes(root: Path) -> int:
    """The first run also pays for files that nobody had read yet."""
    smallest = make_model(root / "smallest", *SMALLEST)
    runs = [checked(load_and_save(smallest, root / "output", MIN_BUDGET_BYTES)) for _ in range(2)]
    return min(run.peak_bytes for run in runs)


def share_of_disk(phase: dict[str, Any], disk: dict[str, float], *, read_bytes: int, written_bytes: int) -> float:
    """Return the least time of a phase's bytes over the time it took."""
    read, written = read_bytes + phase["ssd_read_bytes"], written_bytes + phase["ssd_written_bytes"]
    return seconds_at_disk_rate(disk, read_bytes=read, written_bytes=written) / float(phase["seconds"])


def train_adapters(plan: Plan, folder: Path, budget_bytes: int) -> dict[str, Any]:
    """Train adapters over the model for some steps; return how large the scratch file is, and what it has to hold."""
    shape = {"hidden": plan.hidden, "intermediate": 4 * plan.hidden, "layers": plan.layers, "heads": 8}
    row = {"vocabulary": 8 * plan.hidden, "batch": 1, "sequence": ADAPTER_TOKENS, "checkpointing": 1, "rank": RANK}
    place = {"folder": folder, "ssd": folder.parent, "budget_bytes": budget_bytes, "page_elements": plan.page_elements}
    command = [*worker_command("adapters"), *option_words(shape | row | place)]
    with WorkerProcess("adapters", command, log_directory=str(folder.parent)) as worker:
        steps = [worker.step() for _ in range(ADAPTER_STEPS)]
        report = worker.ask("finish")["report"]
        own_bytes = COPIES_OF_ADAPTERS * FP32_BYTES * worker.description["adapter_parameters"]
        base_bytes = worker.description["base_bytes"]
    read_bytes = min(step["weights_read_bytes"] for step in steps[1:])
    file = {"scratch_file_bytes": report["ssd_file_bytes"], "adapters_and_moments_bytes": own_bytes}
    return file | {"base_bytes": base_bytes, "weights_read_bytes": read_bytes, "steps": steps}


def measure(plan: Plan, root: Path) -> dict[str, Any]:
    """Run the rounds; return them with sizes and limits."""
    base_bytes = measure_base_bytes(root)
    folder, output = make_model(root / "model", plan.hidden, plan.layers), root / "output"
    size_bytes = (folder / "model.safetensors").stat().st_size
    budget_bytes = size_bytes // MODEL_OVER_BUDGET
    limit_bytes = int((base_bytes + budget_bytes) * SLACK)
    probe = DiskProbe(str(root), probe_bytes=plan.probe_bytes)
    rounds: list[dict[str, Any]] = []
    while not are_enough(rounds, wanted=plan.rounds, most=plan.most_rounds):
        disk = probe.bandwidth()
        run = checked(load_and_save(folder, output, budget_bytes, limit_bytes))
        row = json.loads(run.output) | {"disk": disk, "group_peak_bytes": run.peak_bytes}
        run = checked(load_and_save(folder, output, budget_bytes, limit_bytes, checkpoint_pages="in_place"))
        row["in_place"] = json.loads(run.output) | {"group_peak_bytes": run.peak_bytes}
        runs = (row, row["in_place"])
        row["quiet"] = all(is_quiet(phases[phase]) for phases in runs for phase in ("load", "token", "save"))
        seconds = [phases["load"]["seconds"] + phases["token"]["seconds"] for phases in runs]
        row["in_place_over_copied"] = seconds[1] / seconds[0]
        row["tokens_differ"] = int(row["first_token"] != row["in_place"]["first_token"])
        row["load_share"] = share_of_disk(row["load"], disk, read_bytes=size_bytes, written_bytes=0)
        row["save_share"] = share_of_disk(row["save"], disk, read_bytes=0, written_bytes=size_bytes)
        sys.stderr.write(f"load {row['load_share']:.2f}, save {row['save_share']:.2f}, quiet={row['quiet']}\n")
        rounds.append(row)
    same = filecmp.cmp(folder / "model.safetensors", output / "model.safetensors", shallow=False)
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN_CHECK, str(output), str(folder)], capture_output=True, text=True, check=True
    )
    sizes = {"base_bytes": base_bytes, "model_bytes": size_bytes, "budget_bytes": budget_bytes}
    limits = {"limit_bytes": limit_bytes, "limited_by": run.kind}
    results = {"files_differ": int(not same), "tensors_differ": int(plain.stdout)}
    return sizes | limits | results | {"rounds": rounds, "adapters": train_adapters(plan, folder, budget_bytes)}


def summarise(result: dict[str, Any], plan: Plan) -> dict[str, Any]:
    used, is_disturbed = usable(result["rounds"], wanted=plan.rounds)
    ratios = ("load_share", "save_share", "in_place_over_copied")
    shares = {name: spread([row[name] for row in used]) for name in ratios}
    seconds = {f"{phase}_seconds": spread([row[phase]["seconds"] for row in used]) for phase in ("load", "save")}
    disk = {name: spread([row["disk"][name] for row in used]) for name in used[0]["disk"]}
    return result | shares | seconds | {"disk": disk, "disturbed": is_disturbed}


def bars_of(result: dict[str, Any], *, is_timed: bool) -> list[dict[str, Any]]:
    """Return what must hold; rates only where a phase is long enough to have one."""
    rounds = result["rounds"]
    in_place = [row["in_place"] for row in rounds]
    adapters = result["adapters"]
    scratch_share = adapters["scratch_file_bytes"] / adapters["adapters_and_moments_bytes"]
    base_share = adapters["weights_read_bytes"] / (adapters["base_bytes"] - result["budget_bytes"])
    group_peak_bytes = max(row["group_peak_bytes"] for row in [*rounds, *in_place])
    peak_bytes = max(row["peak_bytes"] for row in [*rounds, *in_place])
    bars = [
        at_most("group peak over limit", group_peak_bytes / result["limit_bytes"], 1),
        at_most("engine peak over budget", peak_bytes / result["budget_bytes"], 1),
        at_most("in place: bytes written while loading", max(row["load"]["ssd_written_bytes"] for row in in_place), 0),
        at_most("first tokens that differ", sum(row["tokens_differ"] for row in rounds), 0),
        at_least("LoRA: bytes read per step over what does not fit", base_share, 1),
        at_most("saved files that differ", result["files_differ"], 0),
        at_most("tensors that differ in plain transformers", result["tensors_differ"], 0),
    ]
    if is_timed:
        for phase in ("load", "save"):
            share = result[f"{phase}_share"]["median"]
            bars.append(at_least(f"{phase} rate over the disk's", share, MIN_SHARE))
        read_share = max(row["load"]["storage_read_bytes"] for row in in_place) / result["model_bytes"]
        bars.append(at_most("in place: bytes read while loading, of the model's", read_share, 0.05))
        bars.append(at_most("LoRA: scratch file over adapters and their moments", scratch_share, MOST_OF_SCRATCH_FILE))
        ratio = result["in_place_over_copied"]["median"]
        bars.append(at_most("in place: time to the first token, over copied", ratio, 0.6))
    return bars


def main() -> None:
    parser = driver_parser(__doc__)
    options = parser.parse_args()
    plan = SMOKE if options.smoke else FULL
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = summarise(measure(plan, Path(scratch).resolve()), plan)
    bars = bars_of(result, is_timed=not options.smoke)
    benchmark = {"benchmark": "load_save", "machine": machine(options.ssd), "result": result, "bars": bars}
    emit(benchmark, as_json=options.json)


if __name__ == "__main__":
    main()
