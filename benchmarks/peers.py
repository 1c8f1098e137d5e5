"""The same model and step in plain torch, under DeepSpeed ZeRO-3 NVMe offload, under OS swap, and under torch_offload.

    python benchmarks/peers.py --json --ssd /mnt/nvme --dtype fp32 > benchmarks/results/peers_fp32.json
    python benchmarks/peers.py --json --ssd /mnt/nvme --dtype bf16 > benchmarks/results/peers_bf16.json
    python benchmarks/peers.py --json --ssd /mnt/nvme --sequence 128 --update backward --peers deepspeed
    python benchmarks/peers.py --json --ssd /mnt/nvme --ranks 2 --peers deepspeed
    python benchmarks/peers.py --smoke

A random-init Llama of 218 M parameters, batch 1 x 256 tokens, AdamW. Needs root (a memory cgroup, a swap file: both
are removed at the end, leftovers of killed runs at the next start), libaio-dev, 24 GiB of disk and 24 of memory; some
50 minutes for fp32 and 35 for bf16 on two cores, plus 10 on the first use of DeepSpeed, which is installed into
--deepspeed-venv with the torch and transformers of this environment and builds its operators there.

Rows, each in a process of its own, all alive at once and taking turns step by step, with a raw-disk probe per round:
    plain              stock torch in memory; bf16: fp32 masters, stock fused AdamW over them
    plain_huge         the same with malloc and torch asking for huge pages; beside plain alone, in rounds of its own
    in_memory          bf16 only: torch_offload.AdamW without paging, whose losses and weights ours must equal
    deepspeed          parameters, gradients and states on NVMe; the fastest of the settings that were tried
    ours_at_peer       the process limited to the peak resident memory of DeepSpeed's (of plain's without DeepSpeed)
    ours_at_half       ... and to half of that
    swap               fp32 only: plain torch in a memory cgroup of 40 % of the state, the rest in a swap file
    ours_at_swap       in a cgroup of the same limit that may not swap
A process limit becomes a budget: the limit less 2 %, less what the process holds without the model.

With --ranks each row is a process for each rank over gloo, with its share of the cores: plain torch and ours divide the
model by `fully_shard`, and each of our processes is limited to the peak of DeepSpeed's largest. There is no
ours_at_half. The group of swap has what the further ranks hold without a model on top.

DeepSpeed is faster with more memory. So of all settings that were tried (harness/deepspeed_search.py) each of which no
other one is both faster and smaller also takes turns with ours, limited to the memory at which that one peaked. The row
is the fastest whose memory leaves room for the other rows beside it, none of which takes more than plain torch.
"""

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import deepspeed_search, deepspeed_setup
from harness.disk import DiskProbe, seconds_at_disk_rate
from harness.memory_group import (
    LimitsUnavailable,
    MemoryGroup,
    SwapFile,
    end_cleanly_on_signals,
    remove_leftovers,
    scratch_directory,
)
from harness.options import driver_parser
from harness.process_memory import PLAIN_HUGE
from harness.provenance import machine
from harness.rank_group import RanksAsOne
from harness.reporting import at_least, at_most, emit, progress, spread, usable
from harness.rounds import Workers
from harness.worker_process import SteppingWorker, WorkerFailed, WorkerProcess, worker_command
from models.workloads import TINY, Workload

import torch_offload

SWAP_SHARE = 0.40
MIN_FREE_BYTES = 24 << 30
RANKS_BAR = 2.0  # DeepSpeed over ours at its peak
RANKS_SWAP_BAR = 5.0
BARS = {"fp32": {"ours_at_peer": 4.0, "ours_at_half": 2.5}, "bf16": {"ours_at_peer": 3.0, "ours_at_half": 1.5}}
SWAP_BAR = 6.0
PEERS = ("deepspeed", "swap")
FIRST_PORT = 29511
MIN_IN_HUGE_PAGES = 0.5  # of the state, without which plain_huge is no other than plain


@dataclass(frozen=True)
class Plan:
    """What is run, and how often."""

    workload: Workload
    dtype: str
    peers: tuple[str, ...]
    update: str = ""  # of Config, for our rows
    ranks: int = 1
    rounds: int = 5
    most_rounds: int = 10
    warmup: int = 2
    probe_bytes: int = 256 << 20


class Rows:
    """The workers of a run. Leaving it ends them and removes what they ran in."""

    def __init__(self, plan: Plan, scratch: str, venv: Path) -> None:
        self.plan = plan
        self.scratch = scratch
        self.venv = venv
        self.workers = Workers()
        self.limits: dict[str, float] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self.started = 0  # groups of ranks
        self.nvme: dict[Path, SteppingWorker | None] = {}  # of DeepSpeed, by folder; none where it did not start
        self.stack = ExitStack()

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def shape(self) -> list[str]:
        names = ("hidden", "intermediate", "layers", "heads", "vocabulary", "batch", "sequence", "checkpointing")
        values = asdict(self.plan.workload)
        words = [word for name in names for word in (f"--{name}", str(values[name]))]
        return [*words, "--dtype", self.plan.dtype, "--ssd", self.scratch]

    def add(self, name: str, *options: str, group: MemoryGroup | None = None) -> SteppingWorker:
        """Start a worker of ours and let it warm up."""
        if group is not None:
            self.groups[name] = group
        return self.keep(self.start(name, *options, group=group))

    def start(self, name: str, *options: str, group: MemoryGroup | None = None, **environment: str) -> SteppingWorker:
        """Start a worker of ours that the caller ends."""
        page_elements = str(self.plan.workload.page_elements)
        ranks = self.plan.ranks
        worker = worker_command("step" if ranks == 1 else "sharded_step")
        command = [*worker, *self.shape(), "--page-elements", page_elements, *options]
        command = command if group is None else group.command(command)
        if ranks == 1:
            return WorkerProcess(name, command, log_directory=self.scratch, **environment)
        self.started += 1
        met = ["--ranks", str(ranks), "--group", str(Path(self.scratch, f"{name}-{self.started}.group"))]
        commands = [[*command, *met, "--rank", str(rank)] for rank in range(ranks)]
        environments = [environment | {"OMP_NUM_THREADS": str(self.threads)}] * ranks
        return RanksAsOne(name, commands, environments, log_directory=self.scratch)

    @property
    def beside_deepspeed(self) -> int:
        """How many other rows are alive, each of which takes what plain torch takes, or less."""
        return 2 + (self.plan.ranks == 1) + ("swap" in self.plan.peers)

    @property
    def threads(self) -> int:
        """What a rank has of the cores."""
        return max(1, (os.cpu_count() or 1) // self.plan.ranks)

    def start_limited(self, name: str, limit_bytes: float) -> SteppingWorker:
        """Start a paged worker whose process is limited, which the caller ends."""
        return self.start(name, "--process-limit-bytes", str(int(limit_bytes)), *self.optimizer())

    def add_ours(self, name: str, limit_bytes: float, *, group: MemoryGroup | None = None) -> None:
        """Start a paged worker whose process is limited."""
        self.limits[name] = limit_bytes
        self.add(name, "--process-limit-bytes", str(int(limit_bytes)), *self.optimizer(), group=group)

    def optimizer(self) -> list[str]:
        kind = ["--optimizer", "offload"] if self.plan.dtype == "bf16" else []
        return [*kind, "--update", self.plan.update] if self.plan.update else kind

    def keep(self, worker: SteppingWorker) -> SteppingWorker:
        self.workers[worker.name] = worker
        self.stack.callback(worker.close)
        worker.warm_up(self.plan.warmup)
        progress(f"{worker.name}: {worker.description} peak {worker.peak_resident_bytes / 1e9:.2f} GB")
        return worker

    def start_deepspeed(self, settings: dict[str, Any], name: str = "deepspeed") -> SteppingWorker:
        for used, ended in list(self.nvme.items()):
            if ended is None or ended.process.poll() is not None:  # of settings tried before
                shutil.rmtree(used)
                del self.nvme[used]
        folder = Path(self.scratch, f"{name}-nvme")
        folder.mkdir()
        self.nvme[folder] = None
        script = [*worker_command("deepspeed", python=str(self.venv / "bin" / "python"))]
        words = [*self.shape(), "--ssd", str(folder), "--settings", deepspeed_setup.as_option(settings)]
        environment = deepspeed_setup.environment(self.venv)
        environment["MASTER_PORT"] = str(FIRST_PORT + len(self.nvme))
        ranks = self.plan.ranks
        worker: SteppingWorker
        if ranks == 1:
            worker = WorkerProcess(name, [*script, *words], log_directory=self.scratch, **environment)
        else:
            environment |= {"OMP_NUM_THREADS": str(self.threads), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
            environments = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            worker = RanksAsOne(name, [[*script, *words]] * ranks, environments, log_directory=self.scratch)
        self.nvme[folder] = worker
        return worker

    def make_group(self, name: str, limit_bytes: int, *, may_swap: bool) -> MemoryGroup:
        group = MemoryGroup(name, limit_bytes, may_swap=may_swap)
        self.stack.callback(group.remove)
        return group


def choose_deepspeed(
    rows: Rows, settings: dict[str, Any] | None, probe: DiskProbe, *, most_bytes: float
) -> dict[str, Any]:
    """Find DeepSpeed's settings, unless they are given, and put ours beside each that is not dominated."""
    deepspeed_setup.ensure(rows.venv)
    if settings is not None:
        return {"settings": settings, "tried": [], "pareto": []}
    tried = deepspeed_search.search(rows.start_deepspeed)
    final = deepspeed_search.fastest(tried, rows.start_deepspeed, most_bytes=most_bytes)
    pareto = [
        beside_ours(rows, row, probe)
        for row in deepspeed_search.not_dominated(tried)
        if row["settings"] != final["settings"]  # it is a row of its own
    ]
    return {"settings": final["settings"], "final": final, "tried": tried, "pareto": pareto}


def beside_ours(rows: Rows, row: dict[str, Any], probe: DiskProbe) -> dict[str, Any]:
    """Let DeepSpeed with some settings and ours, limited to the peak that it had, take turns."""
    try:
        return row | {
            "beside_ours": compared(
                rows,
                {
                    "deepspeed": lambda: rows.start_deepspeed(row["settings"]),
                    "ours": lambda: rows.start_limited("ours_at_pareto", row["peak_resident_bytes"]),
                },
                probe,
            )
        }
    except WorkerFailed as failure:
        return row | {"failure_beside_ours": str(failure)}  # such as a limit that our base does not fit


def compared(rows: Rows, starts: dict[str, Callable[[], SteppingWorker]], probe: DiskProbe) -> dict[str, Any]:
    """Let two workers take turns and end; return spreads of each, of the first over the second, and the rounds."""
    with Workers() as workers:
        for name, start_worker in starts.items():
            workers[name] = start_worker()
            workers[name].warm_up(rows.plan.warmup)
        rounds = workers.take_turns(wanted=rows.plan.rounds, most=rows.plan.most_rounds, probe=probe)
    used, is_disturbed = usable(rounds, wanted=rows.plan.rounds)
    first, second = starts
    return {
        "disturbed": is_disturbed,
        "seconds": {name: spread([row["steps"][name]["seconds"] for row in used]) for name in starts},
        "highest_resident_bytes": {name: worker.peak_resident_bytes for name, worker in workers.items()},
        "ratio": ratio(used, first, second),
        "rounds": rounds,
    }


def compare_huge_pages(rows: Rows, probe: DiskProbe) -> dict[str, Any]:
    """Put plain torch with huge pages beside plain torch as it is, before the others need the memory."""
    starts = {"plain_huge": lambda: rows.start("plain_huge", **PLAIN_HUGE), "plain": lambda: rows.start("plain")}
    return compared(rows, starts, probe)


def start(rows: Rows, settings: dict[str, Any] | None) -> None:
    """Start all rows, smallest surprise first; `settings` are those of DeepSpeed."""
    plan = rows.plan
    has_optimizer = plan.dtype == "fp32" or hasattr(torch_offload, "AdamW")
    plain = rows.add("plain")
    peer_bytes = plain.peak_resident_bytes
    if settings is not None:
        peer_bytes = rows.keep(rows.start_deepspeed(settings)).peak_resident_bytes
    if plan.dtype == "bf16" and has_optimizer:
        rows.add("in_memory", *rows.optimizer())
    if has_optimizer:
        rows.add_ours("ours_at_peer", peer_bytes)
        if "deepspeed" in plan.peers and plan.ranks == 1:
            rows.add_ours("ours_at_half", peer_bytes / 2)
    if "swap" in plan.peers and plan.dtype == "fp32":
        start_swap(rows)


def start_swap(rows: Rows) -> None:
    """Start plain torch under a limit with swap, and ours under the same limit without."""
    ranks = rows.plan.ranks
    further_bytes = (ranks - 1) * rows.workers["ours_at_peer"].description["base_bytes"]
    limit_bytes = int(SWAP_SHARE * rows.plan.workload.state_bytes) + further_bytes
    rows.stack.enter_context(SwapFile(rows.scratch, int(1.5 * rows.plan.workload.state_bytes)))
    rows.add("swap", group=rows.make_group("swap", limit_bytes, may_swap=True))
    rows.add_ours("ours_at_swap", limit_bytes / ranks, group=rows.make_group("ours", limit_bytes, may_swap=False))


def summarise(rows: Rows, rounds: list[dict[str, Any]], final: dict[str, Any]) -> dict[str, Any]:
    """Sum up each row over the rounds that count. Swapping is counted for the whole machine and belongs to one row."""
    return {
        name: {
            "description": worker.description,
            "final": final[name],
            "limit_bytes": rows.limits.get(name),
            "highest_resident_bytes": worker.peak_resident_bytes,
            "group_peak_bytes": rows.groups[name].peak_bytes() if name in rows.groups else None,
            "share_of_probe": spread([share_of_probe(row, name) for row in rounds]),
        }
        | {
            key: spread([row["steps"][name][key] for row in rounds])
            for key, value in rounds[0]["steps"][name].items()
            if isinstance(value, (int, float)) and (name == "swap" or not key.startswith("swap_"))
        }
        for name, worker in rows.workers.items()
    }


def row_of(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a row needs of a worker that had rounds of its own."""
    return {
        "limit_bytes": None,
        "seconds": comparison["seconds"][name],
        "highest_resident_bytes": comparison["highest_resident_bytes"][name],
    }


def share_of_probe(row: dict[str, Any], name: str) -> float:
    """Return the share of a step's seconds that its traffic takes at the rate of the disk in this round.

    What a process reads counts what it swaps in, what it writes does not count what it swaps out.
    """
    step, disk = row["steps"][name], row["disk"]
    written = step["process_write_bytes"] + (step["swap_out_bytes"] if name == "swap" else 0)
    seconds = seconds_at_disk_rate(disk, read_bytes=step["process_read_bytes"], written_bytes=written)
    return seconds / float(step["seconds"])


def ratio(rounds: list[dict[str, Any]], slow: str, fast: str) -> dict[str, float]:
    """Return how many times longer one row takes than another, round by round."""
    values = [
        row["steps"][slow]["seconds"] / row["steps"][fast]["seconds"]
        for row in rounds
        if slow in row["steps"] and fast in row["steps"]
    ]
    return spread(values or [math.nan])


def bars_of(plan: Plan, result: dict[str, Any], used: list[dict[str, Any]], *, is_timed: bool) -> list[dict[str, Any]]:
    bars = []
    of_deepspeed = BARS[plan.dtype] if plan.ranks == 1 else {"ours_at_peer": RANKS_BAR}
    wanted = [("deepspeed", name, target) for name, target in of_deepspeed.items() if "deepspeed" in plan.peers]
    if "swap" in plan.peers and plan.dtype == "fp32":
        wanted.append(("swap", "ours_at_swap", SWAP_BAR if plan.ranks == 1 else RANKS_SWAP_BAR))
    for peer, name, target in wanted if is_timed else ():
        bars.append(at_least(f"{peer} over {name}, {plan.dtype}", ratio(used, peer, name)["median"], target))
    rows, huge = result["rows"], result["plain_huge"]
    differing = sum(row["steps"]["plain_huge"]["loss"] != row["steps"]["plain"]["loss"] for row in huge["rounds"])
    bars.append(at_most("plain_huge losses that differ from plain", differing, 0))
    if is_timed:
        in_huge_pages = min(row["steps"]["plain_huge"]["huge_page_bytes"] for row in huge["rounds"])
        share = in_huge_pages / plan.workload.state_bytes
        bars.append(at_least(f"plain_huge memory in huge pages over its state, {plan.dtype}", share, MIN_IN_HUGE_PAGES))
    for name, row in rows.items():
        if row["limit_bytes"] is not None:
            peak = row["highest_resident_bytes"] / row["limit_bytes"]
            bars.append(at_most(f"{name} peak resident memory over its limit, {plan.dtype}", peak, 1))
    reference = "plain" if plan.dtype == "fp32" else "in_memory"
    for name in rows:
        if reference in rows and name not in ("plain", "plain_huge", "in_memory", "deepspeed"):
            count = sum(row["steps"][name]["loss"] != row["steps"][reference]["loss"] for row in result["rounds"])
            count += rows[name]["final"]["weights_sha256"] != rows[reference]["final"]["weights_sha256"]
            bars.append(at_most(f"{name} losses and weight hashes that differ from {reference}", count, 0))
    return bars


def measure(plan: Plan, scratch: str, venv: Path, settings: dict[str, Any] | None) -> dict[str, Any]:
    probe = DiskProbe(scratch, probe_bytes=plan.probe_bytes)
    with Rows(plan, scratch, venv) as rows:
        huge = compare_huge_pages(rows, probe)
        others_bytes = rows.beside_deepspeed * huge["highest_resident_bytes"]["plain"]
        most_bytes = machine(scratch)["memory_bytes"] / plan.ranks - others_bytes
        deepspeed = choose_deepspeed(rows, settings, probe, most_bytes=most_bytes) if "deepspeed" in plan.peers else {}
        start(rows, deepspeed.get("settings"))
        rounds = rows.workers.take_turns(wanted=rows.plan.rounds, most=rows.plan.most_rounds, probe=probe)
        final = rows.workers.finish()
        used, is_disturbed = usable(rounds, wanted=plan.rounds)
        return {
            "workload": asdict(plan.workload),
            "dtype": plan.dtype,
            "update": plan.update,
            "ranks": plan.ranks,
            "disturbed": is_disturbed,
            "disk": {key: spread([row["disk"][key] for row in used]) for key in used[0]["disk"]},
            "plain_huge": huge,
            "deepspeed_settings_tried": deepspeed.get("tried", []),
            "deepspeed_most_bytes": most_bytes,
            "deepspeed_final": deepspeed.get("final"),
            "deepspeed_pareto": deepspeed.get("pareto", []),
            "rows": summarise(rows, used, final) | {"plain_huge": row_of(huge, "plain_huge")},
            "times_plain": {name: ratio(used, name, "plain") for name in rows.workers},
            "times_ours": {
                f"{peer} over {name}": ratio(used, peer, name)
                for peer in PEERS
                for name in rows.workers
                if peer in rows.workers and name.startswith("ours")
            },
            "rounds": rounds,
            "used_rounds": [row["quiet"] or is_disturbed for row in rounds],
        }


def parse_options() -> argparse.Namespace:
    parser = driver_parser(__doc__, smoke="a tiny model without peers, in seconds")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--update", default="", help="a value of Config.update for our rows; default: the package's")
    parser.add_argument("--peers", default=",".join(PEERS), help="of deepspeed, swap (default: both)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a row, over gloo (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--most-rounds", type=int, default=Plan.most_rounds)
    venv = Path(tempfile.gettempdir(), "torch-offload-deepspeed")
    parser.add_argument("--deepspeed-venv", type=Path, default=venv, help="default: %(default)s")
    parser.add_argument(
        "--deepspeed-settings", type=deepspeed_setup.from_option, help="JSON: these instead of a search; {} for ours"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    end_cleanly_on_signals()
    peers = () if options.smoke else tuple(name for name in options.peers.split(",") if name)
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"unknown peers {sorted(unknown)}; there are {', '.join(PEERS)}")
    if options.smoke:
        smoke = {"rounds": 1, "most_rounds": 1, "warmup": 1, "probe_bytes": 16 << 20}
        plan = Plan(TINY, options.dtype, peers, options.update, options.ranks, **smoke)
    else:
        workload = Workload(f"{options.sequence} tokens", batch=1, sequence=options.sequence, checkpointing=0)
        most_rounds = max(options.rounds, options.most_rounds)
        plan = Plan(workload, options.dtype, peers, options.update, options.ranks, options.rounds, most_rounds)
        free_bytes = shutil.disk_usage(options.ssd).free
        if free_bytes < MIN_FREE_BYTES:
            raise SystemExit(f"{MIN_FREE_BYTES} bytes are needed in {options.ssd}, {free_bytes} are free")
    remove_leftovers(options.ssd)
    try:
        with scratch_directory(options.ssd) as scratch:
            result = measure(plan, scratch, options.deepspeed_venv, options.deepspeed_settings)
    except LimitsUnavailable as reason:
        raise SystemExit(f"{reason}; or leave swap out: --peers deepspeed") from reason
    used = [row for row, counts in zip(result["rounds"], result["used_rounds"], strict=True) if counts]
    bars = bars_of(plan, result, used, is_timed=not options.smoke)
    emit({"benchmark": "peers", "machine": machine(options.ssd), **result, "bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
