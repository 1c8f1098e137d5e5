"""What generating and evaluating take with a model of twice the memory, beside the other ways to run one.

    python benchmarks/generate.py --json --ssd /mnt/nvme > benchmarks/results/generate.json     (some 30 minutes)
    python benchmarks/generate.py --smoke

A random-init Llama of 1.2 B parameters in bf16 is saved once. Processes that take turns:
    plain               in memory
    paged               a budget of half of the weights
    mapped              transformers over the mapped file: what fits stays in the system's page cache
    disk                accelerate's device_map={"": "disk"}
    llama_cpp           llama.cpp over the mapped file of the same bf16 weights in its own format; tokens of one row
All but `plain` are in a memory group of their own, limited to what the process holds without the model (the peak of
one that generates with a model of some kilobytes) and half of the weights. Each of these reads a file of its own that
nobody has read before: pages of the system's cache count in the group that had them read. A step is eight tokens for
one row, eight for each of sixteen rows, or the loss of 2,048 tokens. The least bytes of a pass are those of furthest
next use over the engine's own list of uses. The limit of a step is what it takes in memory or what its bytes take at
the disk's rate (harness/disk.py), whichever is more. That of its passes is the same pass by pass, added up: a prompt of
many tokens computes for longer than it reads, a token reads for longer than it computes, and there is no memory to read
for the one during the other. Ratios are medians of those within a round.

llama.cpp is measured where llama-cpp-python is installed, in the environment that runs this: cmake builds it in some
ten minutes (`pip install llama-cpp-python`). Its process does without torch and has the same limit, so more of its file
stays in memory than of the others'. Only its speed is compared: its kernels are others than torch's, so tokens differ.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.cached_files import forget_cached
from harness.disk import DiskProbe
from harness.memory_group import MemoryGroup, end_cleanly_on_signals
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Round, Workers
from harness.worker_process import WorkerProcess, option_words, worker_command
from models.llama_gguf import write_gguf

MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder, hidden, layers, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden,
    num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
    max_position_embeddings=4096, tie_word_embeddings=False)).save_pretrained(folder, max_shard_size="100GB")
"""
OF_WEIGHTS = 0.5
LIMIT_TOLERANCE = 1.02  # of the memory that a process may take beside what it holds before the model
PEERS = {"mapped": 2.0, "disk": 3.0, "llama_cpp": 1.2}  # least seconds over ours, generating one row
MAX_OVER_LEAST = 1.05
MAX_EVALUATION = 1.10


@dataclass(frozen=True)
class Task:
    """What a step does, and the least share of its limit that is asked for."""

    name: str
    rows: int
    prompt: int
    new_tokens: int
    least_share: float = 0


@dataclass(frozen=True)
class Plan:
    """The model, what is done with it, and how often."""

    hidden: int
    layers: int
    vocabulary: int
    tasks: tuple[Task, ...]
    rounds: int = 5
    most_rounds: int = 8
    warmup: int = 3
    probe_bytes: int = 256 << 20
    page_elements: int = 1 << 20
    judges_time: bool = True


USUAL = Plan(
    hidden=2048,
    layers=16,
    vocabulary=32000,
    tasks=(
        Task("8 tokens of 1 row", rows=1, prompt=32, new_tokens=8, least_share=0.85),
        Task("8 tokens of 16 rows", rows=16, prompt=32, new_tokens=8, least_share=0.90),
        Task("evaluation of 2048 tokens", rows=1, prompt=2048, new_tokens=0),
    ),
)
SMOKE = Plan(
    hidden=256,
    layers=8,
    vocabulary=512,
    tasks=(Task("2 tokens of 1 row", rows=1, prompt=4, new_tokens=2),),
    rounds=1,
    most_rounds=1,
    warmup=2,
    probe_bytes=16 << 20,
    page_elements=1 << 14,
    judges_time=False,
)
SMALLEST = (64, 1, 64)


def make_model(folder: Path, *shape: int) -> Path:
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder), *map(str, shape)], check=True)
    return folder


def options_of(task: Task, folder: Path, variant: str, **more: Any) -> list[str]:
    values = {key: value for key, value in asdict(task).items() if key not in ("name", "least_share")}
    values |= {"folder": folder, "variant": variant, "ssd": folder.parent} | more
    words = option_words(values)
    return [*worker_command("generate"), *words]


def own_copy(folder: Path, variant: str) -> Path:
    """Return a copy of the model that is on the disk alone."""
    copied = Path(shutil.copytree(folder, folder.with_name(f"model-{variant}"), dirs_exist_ok=True))
    forget_cached(copied)
    return copied


def has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def variants_of(task: Task) -> list[str]:
    """Return who takes turns at a task: plain torch first."""
    is_for_llama_cpp = task.rows == 1 and task.new_tokens > 0 and has_llama_cpp()
    return ["plain", "paged", *(name for name in PEERS if name != "llama_cpp" or is_for_llama_cpp)]


def command_of(plan: Plan, task: Task, folder: Path, variant: str, budget_bytes: int) -> list[str]:
    """Return the command of a variant that reads a file of its own."""
    if variant == "llama_cpp":
        file = folder.with_name("model.gguf")
        write_gguf(folder, file)
        forget_cached(file)
        words = option_words({"file": file, "prompt": task.prompt, "new_tokens": task.new_tokens})
        return [*worker_command("llama_cpp"), *words]
    more = {"budget_bytes": budget_bytes, "page_elements": plan.page_elements} if variant == "paged" else {}
    return options_of(task, own_copy(folder, variant), variant, **more)


def measure_base_bytes(root: Path, task: Task) -> int:
    """Return what a process peaks at that generates with next to no model."""
    smallest = make_model(root / "smallest", *SMALLEST)
    with WorkerProcess("base", options_of(task, smallest, "plain"), log_directory=str(root)) as worker:
        return int(worker.step()["peak_resident_bytes"])


def measure(plan: Plan, task: Task, folder: Path, base_bytes: int, probe: DiskProbe) -> dict[str, Any]:
    """Let the variants take turns."""
    progress(task.name)
    weight_bytes = (folder / "model.safetensors").stat().st_size
    limit_bytes = int(base_bytes + OF_WEIGHTS * weight_bytes)
    budget_bytes = int(limit_bytes / LIMIT_TOLERANCE) - base_bytes if plan.judges_time else weight_bytes // 2
    groups: dict[str, MemoryGroup] = {}
    with ExitStack() as stack:
        workers = Workers()
        for variant in variants_of(task):
            command = command_of(plan, task, folder, variant, budget_bytes)
            if variant != "plain" and plan.judges_time:
                groups[variant] = MemoryGroup(variant, limit_bytes, may_swap=False)
                stack.callback(groups[variant].remove)
                command = groups[variant].command(command)
            workers[variant] = WorkerProcess(variant, command, log_directory=str(folder.parent))
            stack.callback(workers[variant].close)
            workers[variant].warm_up(plan.warmup)
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        replay = workers["paged"].ask("replay")
        final = {name: answer | workers[name].description for name, answer in workers.finish().items()}
        report = final["paged"].pop("report")
        peaks = {name: group.peak_bytes() for name, group in groups.items()}
    sizes = {"weight_bytes": weight_bytes, "budget_bytes": budget_bytes, "limit_bytes": limit_bytes}
    told = {"task": asdict(task), "replay": replay, "report": report, "workers": final}
    told |= {"group_peak_bytes": peaks, "rounds": rounds}
    return sizes | told | summarise(rounds, plan)


def limit_of(plain: dict[str, Any], paged: dict[str, Any], read_rate: float) -> float:
    """Return the seconds below which what computes like `plain` and reads like `paged` cannot come."""
    return max(float(plain["seconds"]), paged["ssd_read_bytes"] / read_rate)


def summarise(rounds: list[Round], plan: Plan) -> dict[str, Any]:
    used, is_disturbed = usable(rounds, wanted=plan.rounds)
    names = used[0]["steps"]
    shares, shares_of_passes = [], []
    for row in used:
        paged, plain = row["steps"]["paged"], row["steps"]["plain"]
        read_rate = row["disk"]["read_bytes_per_second"]
        shares.append(limit_of(plain, paged, read_rate) / paged["seconds"])
        pairs = zip(plain["passes"], paged["passes"], strict=True)
        shares_of_passes.append(sum(limit_of(*pair, read_rate) for pair in pairs) / paged["seconds"])
    return {
        "disturbed": is_disturbed,
        "seconds": {name: spread([row["steps"][name]["seconds"] for row in used]) for name in names},
        "over_paged": {
            name: spread([row["steps"][name]["seconds"] / row["steps"]["paged"]["seconds"] for row in used])
            for name in names
        },
        "read_bytes": {name: spread([row["steps"][name]["read_bytes"] for row in used]) for name in names},
        "share_of_limit": spread(shares),
        "share_of_limit_of_passes": spread(shares_of_passes),
        "disk": {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]},
    }


def bars_of(result: dict[str, Any], *, judges_time: bool) -> list[dict[str, Any]]:
    task, report, replay = result["task"], result["report"], result["replay"]
    label = task["name"]
    expected = result["rounds"][0]["steps"]["plain"]["result_sha256"]
    differing = sum(row["steps"]["paged"]["result_sha256"] != expected for row in result["rounds"])
    bars = [
        at_most(f"paged steps with other tokens or another loss than plain, {label}", differing, 0),
        at_most(f"paged peak over budget, {label}", report["host_peak_bytes"] / report["budget_bytes"], 1),
    ]
    if not judges_time:
        return bars
    over_least = replay["read_bytes"] / max(1, replay["least_read_bytes"])
    bars.append(at_most(f"bytes read over those of furthest next use, {label}", over_least, MAX_OVER_LEAST))
    if task["least_share"]:
        share = result["share_of_limit"]["median"]
        bars.append(at_least(f"share of the limit, {label}", share, task["least_share"]))
        share_of_passes = result["share_of_limit_of_passes"]["median"]
        bars.append(at_least(f"share of the limit of its passes, {label}", share_of_passes, task["least_share"]))
        if task["rows"] == 1:
            for name, least in PEERS.items():
                if name in result["over_paged"]:
                    bars.append(at_least(f"{name} over paged, {label}", result["over_paged"][name]["median"], least))
    else:
        ratios = [row["steps"]["paged"]["seconds"] / row["steps"]["plain"]["seconds"] for row in result["rounds"]]
        bars.append(at_most(f"paged over plain, {label}", spread(ratios)["median"], MAX_EVALUATION))
    return bars


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="quiet rounds to measure; default: 5")
    options = parser.parse_args()
    end_cleanly_on_signals()
    plan = SMOKE if options.smoke else USUAL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        root = Path(scratch).resolve()
        folder = make_model(root / "model", plan.hidden, plan.layers, plan.vocabulary)
        base_bytes = measure_base_bytes(root, plan.tasks[0])
        probe = DiskProbe(scratch, probe_bytes=plan.probe_bytes)
        results = [measure(plan, task, folder, base_bytes, probe) for task in plan.tasks]
    bars = [bar for result in results for bar in bars_of(result, judges_time=plan.judges_time)]
    told = {"benchmark": "generate", "machine": machine(options.ssd), "base_bytes": base_bytes, "tasks": results}
    missing = [] if has_llama_cpp() else ["llama-cpp-python is not installed"]
    emit(told | {"bars": bars, "not_measured": missing}, as_json=options.json)


if __name__ == "__main__":
    main()
