"""How near the CUDA kernels come to the speed of the GPU's memory, and what crosses the bus.

    make gpu-bench
    python benchmarks/gpu_kernels.py --json > benchmarks/results/gpu_kernels.json
    python benchmarks/gpu_kernels.py --smoke        (small arrays: shows that it runs, no bar means anything)

The kernels are bound by memory, so each is compared with a copy on the device: bytes read and written per second,
counted the same way. Every figure is the median of rounds in which the kernels and the copy take turns, timed with the
GPU's own events over several launches. Transfers are between the device and pinned host memory.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness.provenance import machine
from harness.reporting import at_least, emit, progress, spread
from torch import Tensor

import torch_offload

MIN_SHARE = 0.80  # of the rate of a copy


@dataclass(frozen=True)
class Plan:
    """How much is moved and how often."""

    elements: int = 256 << 20
    rounds: int = 9
    launches: int = 10


SMOKE = Plan(elements=1 << 20, rounds=2, launches=2)


@dataclass(frozen=True)
class Case:
    """Something that is launched, and the bytes that it reads and writes."""

    run: Callable[[], Any]
    moved_bytes: int


def adamw_case(elements: int, *, form: str) -> Case:
    """Make one parameter with its state; the bytes are those of docs/reference/adamw.md."""
    options = {"device": "cuda"}
    gradient = torch.randn(elements, dtype=torch.bfloat16, **options)
    weight = torch.randn(elements, dtype=torch.bfloat16, **options)
    if form == "8-bit moments":
        blocks = -(-elements // 2048)
        moments = [torch.zeros(blocks * 2048, dtype=torch.uint8, **options) for _ in range(2)]
    else:
        moments = [torch.zeros(elements, **options) for _ in range(2)]
    if form == "fp32 master":
        master: Tensor = weight.float()
    else:
        master = torch.zeros(elements, dtype=torch.int16, **options)
    per_element = {"split master": 26, "fp32 master": 28, "8-bit moments": 14}[form]
    step = torch.tensor(1.0)

    def run() -> None:
        torch.ops.torch_offload.fused_adamw_(
            [weight], [gradient], [moments[0]], [moments[1]], [], [master], [step],
            lr=1e-5, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return Case(run, per_element * elements)


def writeback_case(elements: int, *, from_type: torch.dtype, to_type: torch.dtype | None) -> Case:
    gradient = torch.randn(elements, dtype=from_type, device="cuda")
    to = None if to_type is None else torch.empty(elements, dtype=to_type, device="cuda")
    moved_bytes = gradient.nbytes + (0 if to is None else to.nbytes)
    return Case(lambda: torch.ops.torch_offload.write_back_gradient(gradient, to), moved_bytes)


def kernel_cases(elements: int) -> dict[str, Callable[[], Case]]:
    """Return makers, so that only one case is in memory at a time."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "AdamW, split master": lambda: adamw_case(elements, form="split master"),
        "AdamW, fp32 master": lambda: adamw_case(elements, form="fp32 master"),
        "AdamW, 8-bit moments": lambda: adamw_case(elements, form="8-bit moments"),
        "writeback, bf16, norm only": lambda: writeback_case(elements, from_type=bf16, to_type=None),
        "writeback, bf16 to bf16": lambda: writeback_case(elements, from_type=bf16, to_type=bf16),
        "writeback, fp32 to bf16": lambda: writeback_case(elements, from_type=fp32, to_type=bf16),
    }


def copy_case(to: Tensor, source: Tensor, *, moved_bytes: int) -> Case:
    return Case(lambda: to.copy_(source, non_blocking=True), moved_bytes)


def device_copy_case(moved_bytes: int) -> Case:
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8, device="cuda")
    return copy_case(torch.empty_like(source), source, moved_bytes=2 * source.nbytes)


def rate(case: Case, launches: int) -> float:
    """Return bytes per second over some launches in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(launches):
        case.run()
    end.record()
    end.synchronize()
    return case.moved_bytes * launches / (start.elapsed_time(end) / 1e3)


def measure_kernel(make: Callable[[], Case], plan: Plan) -> dict[str, Any]:
    """Let the kernel and a copy of as many bytes take turns."""
    case = make()
    copy = device_copy_case(case.moved_bytes)
    rate(case, plan.launches), rate(copy, plan.launches)
    pairs = [(rate(case, plan.launches), rate(copy, plan.launches)) for _ in range(plan.rounds)]
    return {
        "bytes_per_second": spread([kernel for kernel, _ in pairs]),
        "copy_bytes_per_second": spread([other for _, other in pairs]),
        "share_of_copy": spread([kernel / other for kernel, other in pairs]),
    }


def measure_transfers(plan: Plan) -> dict[str, Any]:
    host = torch.ones(plan.elements, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(plan.elements, dtype=torch.uint8, device="cuda")
    cases = {
        "host to device": copy_case(there, host, moved_bytes=host.nbytes),
        "device to host": copy_case(host, there, moved_bytes=host.nbytes),
    }
    for case in cases.values():
        rate(case, plan.launches)
    return {name: spread([rate(case, plan.launches) for _ in range(plan.rounds)]) for name, case in cases.items()}


def measure(plan: Plan) -> dict[str, Any]:
    kernels = {}
    for name, make in kernel_cases(plan.elements).items():
        kernels[name] = measure_kernel(make, plan)
        progress(f"{name}: {kernels[name]['share_of_copy']['median']:.2f} of a copy")
    bars = [
        at_least(f"{name}: share of the rate of a copy", row["share_of_copy"]["median"], MIN_SHARE)
        for name, row in kernels.items()
    ]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = {"name": properties.name, "processors": properties.multi_processor_count, "memory": properties.total_memory}
    return {
        "machine": machine() | {"gpu": gpu, "torch": torch.__version__},
        "plan": vars(plan),
        "kernels": kernels,
        "pinned_transfers_bytes_per_second": measure_transfers(plan),
        "bars": bars,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--smoke", action="store_true", help="small and short; the bars are not looked at")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not torch_offload._C.built_with_cuda:
        raise SystemExit("this needs a GPU and the CUDA build: make gpu-bench")
    result = measure(SMOKE if arguments.smoke else Plan())
    emit(result, as_json=arguments.json)
    if not arguments.smoke and not all(bar["holds"] for bar in result["bars"]):
        raise SystemExit("a bar does not hold")


if __name__ == "__main__":
    main()
