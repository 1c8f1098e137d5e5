"""How fast a model that does not fit a GPU trains on it, beside the largest of its kind that does.

    make gpu-bench
    python benchmarks/gpu_training.py --json --ssd /mnt/nvme > benchmarks/results/gpu_training.json
    python benchmarks/gpu_training.py --json --ssd /mnt/nvme --update backward > \
        benchmarks/results/gpu_training_backward.json   (nothing is clipped, each gradient is applied when complete)
    python benchmarks/gpu_training.py --profile      (where the time of one paged step goes, as JSON)
    python benchmarks/gpu_training.py --smoke        (a tiny model: shows that it runs)

A random-init Llama of 6.7 B parameters in bf16, checkpointed, torch_offload.AdamW with masters and moments of 8 bit,
gradients clipped, unless updates are those of the backward. Torch and pages together are capped (24 GiB). The model in
the GPU has the same layers, as many as fit the same cap. Two processes take turns; of every turn the first step does
not count. Speed is compared as tokens per second times parameters, since a step is matrix products with all of them.

What binds a step is the longest of: the computation, as the model in the GPU does it, and the bytes of each link over
its rate: that of large copies from and to page-locked memory, and what torch_offload.probe says of a disk that is used.
Matrices repeat one block of random numbers, since drawing them all would take longer than the training that is timed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from harness.gpu_timeline import (
    COMPUTE,
    TO_DEVICE,
    TO_HOST,
    busy_seconds,
    extent_of,
    longest,
    spans_of,
    thread_seconds,
    timeline,
)
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, spread
from harness.worker_process import WorkerProcess
from models.bare_llama import BareLlama, Shape

import torch_offload
from torch_offload import Config
from torch_offload.config import Update

STATE_BYTES = 2 + 2 + 2 + 1 + 1  # of a parameter: weight, gradient, rest of the master, two moments
SSD = "ssd"
KINDS = ("in_gpu", "paged")
WARMUP_STEPS = 3
LINK_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What is trained, in which memory, how often."""

    shape: Shape = field(default_factory=Shape)
    batch: int = 16
    sequence: int = 1024
    device_bytes: int = 24 << 30
    unpaged_bytes: int = 11 << 30
    ram_bytes: int = 64 << 30
    page_elements: int | None = None  # what the engine chooses
    min_paged_bytes: int = 1 << 20
    rounds: int = 5
    measured_steps: int = 2
    update: Update = "step"

    @property
    def max_grad_norm(self) -> float | None:
        """Of the optimizer. What is applied in the backward cannot be clipped."""
        return 1.0 if self.update == "step" else None

    def config(self, ssd: str) -> Config:
        return Config(
            gpu=self.device_bytes,
            gpu_reserved=self.unpaged_bytes,
            ram=self.ram_bytes,
            ssd=ssd,
            **({} if self.page_elements is None else {"page_elements": self.page_elements}),
            min_paged_bytes=self.min_paged_bytes,
            optimizer_device="gpu",
            update=self.update,
            activations="ram",
        )

    @property
    def fitting_layers(self) -> int:
        """How many layers train in the GPU, with what torch needs beside them."""
        state_bytes = self.device_bytes - self.unpaged_bytes
        per_layer = STATE_BYTES * self.shape.layer_parameters
        others = STATE_BYTES * (self.shape.parameters - self.shape.layers * self.shape.layer_parameters)
        return max(1, (state_bytes - others) // per_layer)


SMOKE = Plan(
    Shape(hidden=256, intermediate=512, layers=6, heads=4, vocabulary=512, has_fused_attention=False),
    batch=2,
    sequence=16,
    device_bytes=16 << 20,
    unpaged_bytes=8 << 20,
    ram_bytes=16 << 20,
    page_elements=1 << 14,
    min_paged_bytes=1 << 14,
    rounds=2,
    measured_steps=1,
)


def say(line: str) -> None:
    """Tell the log, which may be all that is left of a run that was cut."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def made_quickly(shape: Shape) -> BareLlama:
    """Make a model in bf16 whose matrices repeat one block of random numbers: others take minutes to draw."""
    with torch.device("meta"):
        model = BareLlama(shape).to(torch.bfloat16)
    model.to_empty(device="cpu")
    block = (0.02 * torch.randn(1 << 20)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            flat = parameter.view(-1)
            for begin in range(0, flat.numel(), block.numel()):
                part = flat[begin : begin + block.numel()]
                part.copy_(block[: part.numel()])
    return model


class Training:
    """A model in training: paged, or in the GPU with as many layers as fit."""

    def __init__(self, plan: Plan, *, is_paged: bool, ssd: str) -> None:
        torch.manual_seed(0)
        self.plan = plan
        self.is_paged = is_paged
        self.shape = plan.shape if is_paged else replace(plan.shape, layers=plan.fitting_layers)
        self.model = made_quickly(self.shape)
        say(f"a model of {self.shape.parameters} parameters is made")
        if is_paged:
            torch_offload.wrap(self.model, config=plan.config(ssd))
        else:
            self.model.cuda()
        self.optimizer = torch_offload.AdamW(
            self.model.parameters(), lr=1e-4, moments="8bit", max_grad_norm=plan.max_grad_norm
        )
        self.ids = torch.randint(0, self.shape.vocabulary, (plan.batch, plan.sequence)).cuda()
        say("it is where it trains")

    def step(self) -> dict[str, float]:
        """Queue a step; return the seconds after which each part of it was queued."""
        begin = time.perf_counter()
        queued = {}
        loss = self.model(self.ids)
        queued["forward"] = time.perf_counter() - begin
        loss.backward()
        queued["backward"] = time.perf_counter() - begin
        self.optimizer.step()
        queued["update"] = time.perf_counter() - begin
        self.optimizer.zero_grad()
        say(f"a step was queued in {time.perf_counter() - begin:.2f} s")
        return queued

    def profiled(self) -> dict[str, Any]:
        """Take a step under torch's profiler, after some that count for nothing."""
        for _ in range(WARMUP_STEPS):
            self.step()
        torch.cuda.synchronize()
        before = thread_seconds()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            queued = self.step()
            torch.cuda.synchronize()
        threads = {name: seconds - before.get(name, 0.0) for name, seconds in thread_seconds().items()}
        spans = spans_of(profile)
        begin, end = extent_of(spans)
        return {
            "queued_after_seconds": queued,
            "seconds": end - begin,
            "computing_seconds": busy_seconds([span for span in spans if span.kind == COMPUTE], begin, end),
            "thread_seconds": {name: seconds for name, seconds in sorted(threads.items()) if seconds > 0},
            "longest": longest(spans),
            "timeline": timeline(spans),
        }

    def turn(self) -> dict[str, float]:
        """Take the steps of a turn; seconds and bytes are of one that counts."""
        self.step()
        torch.cuda.synchronize()
        before, start = self.moved_bytes(), time.perf_counter()
        for _ in range(self.plan.measured_steps):
            self.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        moved = {name: total - before[name] for name, total in self.moved_bytes().items()}
        return {name: value / self.plan.measured_steps for name, value in (("seconds", seconds), *moved.items())}

    def moved_bytes(self) -> dict[str, float]:
        """Return the bytes on each link so far, and what the program waited for."""
        if not self.is_paged:
            return {}
        report = torch_offload.report()
        if report.device is None:
            raise SystemExit("the engine has no device")
        return {
            TO_DEVICE: sum(report.device.to_device_bytes.values()),
            TO_HOST: sum(report.device.to_host_bytes.values()),
            SSD: report.ssd_read_bytes + report.ssd_written_bytes,
            **{f"stalled for {cause}": seconds for cause, seconds in report.stall_seconds.items()},
            "misses": report.misses,
        }

    def describe(self) -> dict[str, float]:
        """Return its size, and what of its budget it took at most."""
        device = torch_offload.report().device if self.is_paged else None
        peak = {"peak_over_budget": device.peak_bytes / device.budget_bytes} if device else {}
        return {"parameters": self.shape.parameters, **peak}

    def serve(self) -> None:
        """Answer "turn" and "describe" on stdin, each with a JSON line."""
        print(json.dumps(self.describe()), flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(self, line.strip())()), flush=True)


def link_rates() -> dict[str, float]:
    """Return the bytes per second of large copies from and to page-locked memory, each alone."""
    here = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    found = {}
    for name, (target, source) in {TO_DEVICE: (there, here), TO_HOST: (here, there)}.items():
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        found[name] = LINK_BYTES / statistics.median(seconds)
    return found


def rates(ssd: str, *, uses_ssd: bool) -> dict[str, float]:
    """Return the bytes per second of each link that the training used."""
    return link_rates() | ({SSD: torch_offload.probe(ssd).ssd_mixed} if uses_ssd else {})


def start(kind: str, plan: Plan, ssd: str, *, is_smoke: bool) -> WorkerProcess:
    """Start the process of a model, which is built when this returns."""
    words = [sys.executable, __file__, "--worker", kind, "--ssd", ssd, *(["--smoke"] if is_smoke else [])]
    words += ["--layers", str(plan.shape.layers), "--batch", str(plan.batch)]
    words += ["--gpu-gib", str(plan.device_bytes / (1 << 30)), "--update", plan.update]
    words += [] if plan.page_elements is None else ["--page-elements", str(plan.page_elements)]
    return WorkerProcess(kind, words, log_directory=ssd)


def measure(plan: Plan, ssd: str, *, is_smoke: bool) -> dict[str, Any]:
    workers: dict[str, WorkerProcess] = {}
    try:
        for kind in KINDS:
            workers[kind] = start(kind, plan, ssd, is_smoke=is_smoke)
        sizes = {kind: worker.description["parameters"] for kind, worker in workers.items()}
        all_turns = []
        for index in range(plan.rounds + 1):
            turns = {kind: worker.ask("turn") for kind, worker in workers.items()}
            say(f"round {index}: {turns}")
            if index > 0:  # the first one records
                all_turns.append(turns)
        final = workers["paged"].ask("describe")
    finally:
        for worker in workers.values():
            worker.close()
    link = rates(ssd, uses_ssd=any(turns["paged"][SSD] > 0 for turns in all_turns))
    rounds = [compared(plan, sizes, turns, link) for turns in all_turns]
    speed = spread([row["speed_over_in_gpu"] for row in rounds])
    return {
        "benchmark": "gpu_training",
        "machine": machine() | {"gpu": torch.cuda.get_device_properties(0).name, "torch": torch.__version__},
        "parameters": sizes,
        "update": plan.update,
        "rates": link,
        "speed_over_in_gpu": speed,
        "tokens_per_second": spread([row["tokens_per_second"] for row in rounds]),
        "busy_share": {name: spread([row["busy"][name] for row in rounds]) for name in rounds[0]["busy"]},
        "share_of_limit": spread([max(row["busy"].values()) for row in rounds]),
        "rounds": rounds,
        "bars": [
            at_least("tokens per second over those of the model in the GPU", speed["median"], 0.9),
            at_most("peak of pages over their budget", final["peak_over_budget"], 1),
        ],
    }


def compared(
    plan: Plan, sizes: dict[str, float], turns: dict[str, dict[str, float]], link: dict[str, float]
) -> dict[str, Any]:
    """Return what a round says."""
    paged, in_gpu = turns["paged"], turns["in_gpu"]
    growth = sizes["paged"] / sizes["in_gpu"]
    busy = {name: paged[name] / rate / paged["seconds"] for name, rate in link.items()}
    busy[COMPUTE] = in_gpu["seconds"] * growth / paged["seconds"]
    return {
        "turns": turns,
        "tokens_per_second": plan.batch * plan.sequence / paged["seconds"],
        "speed_over_in_gpu": busy[COMPUTE],
        "busy": busy,
    }


def plan_of(options: argparse.Namespace) -> Plan:
    plan = SMOKE if options.smoke else Plan()
    if options.layers:
        plan = replace(plan, shape=replace(plan.shape, layers=options.layers))
    if options.batch:
        plan = replace(plan, batch=options.batch)
    if options.gpu_gib:
        device_bytes = int(options.gpu_gib * (1 << 30))
        share = plan.unpaged_bytes / plan.device_bytes
        plan = replace(plan, device_bytes=device_bytes, unpaged_bytes=int(share * device_bytes))
    if options.page_elements:
        plan = replace(plan, page_elements=options.page_elements)
    return replace(plan, rounds=options.rounds or plan.rounds, update=options.update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--ssd", help="directory on a real disk; default: the current one", default=".")
    parser.add_argument(
        "--layers", type=int, help="of the model; fewer are quicker to look at, and no bar is about them"
    )
    parser.add_argument("--batch", type=int, help="rows of a step")
    parser.add_argument("--gpu-gib", type=float, help="what torch and pages may take together; 11/24 of it is torch's")
    parser.add_argument("--page-elements", type=int, help="of a page; default: what the engine chooses")
    parser.add_argument("--update", choices=("step", "backward"), default="step", help="when parameters are updated")
    parser.add_argument("--rounds", type=int, help="that count; five for a result that is kept")
    parser.add_argument("--profile", action="store_true", help="one paged step under torch's profiler instead, as JSON")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: make gpu-bench")
    plan = plan_of(options)
    if options.worker:
        Training(plan, is_paged=options.worker == "paged", ssd=options.ssd).serve()
        return
    if options.profile:
        with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
            print(json.dumps(Training(plan, is_paged=True, ssd=scratch).profiled(), indent=1))
        return
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = measure(plan, scratch, is_smoke=options.smoke)
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
