"""How fast products with coded experts are on a GPU, beside cuBLAS with the same weights in bfloat16.

    make gpu-bench
    python benchmarks/gpu_codec.py --json > benchmarks/results/gpu_codec.json
    python benchmarks/gpu_codec.py --smoke        (small and few: shows that it runs, no bar means anything)

A round multiplies the tokens by each of many experts, one after the other: more of them than the GPU's caches hold, as
in a model, each with a page of its own. Rounds of ours, of cuBLAS and of a copy on the device take turns; they are
timed by the GPU's own events. "graph" replays a round from a CUDA graph and so is the GPU's time alone; "eager" is the
same round called from Python. Figures are medians with their smallest and largest value. Bytes are those that a product
must read and write: the coded extent or the bfloat16 weights, and the tokens on both sides. Tokens are bfloat16.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread
from torch import Tensor

import torch_offload
from torch_offload.moe import operators as coded

MIN_SPEEDUP = 2.0  # over cuBLAS, one token
MAX_SLOWDOWN = 1.3  # 16 tokens over one
MIN_BATCH_SPEEDUP = 0.8  # over cuBLAS, 64 tokens
ZEROS = 0.885


@dataclass(frozen=True)
class Plan:
    """How much is multiplied and how often."""

    rows: int = 4096
    columns: int = 4096
    experts: int = 64
    rounds: int = 9
    tokens: tuple[int, ...] = (1, 4, 16, 64)


SMOKE = Plan(rows=256, columns=320, experts=3, rounds=2, tokens=(1, 16))


CODERS = ("tun12", "rans4")


@dataclass(frozen=True)
class Round:
    """One product with each expert, and the bytes that all of them have to move."""

    run: Callable[[], Any]
    moved_bytes: int


def values_of(plan: Plan) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (plan.rows, plan.columns), generator=generator, dtype=torch.int8) * 2 - 1
    signs[torch.rand(plan.rows, plan.columns, generator=generator) < ZEROS] = 0
    return signs


def coded_round(plan: Plan, values: Tensor, coder: str, x: Tensor) -> Round:
    """Pages of equal bytes at addresses of their own, each used once so that it is open."""
    page = coded.encode(values, coder=coder)
    pages = [page.cuda() for _ in range(plan.experts)]
    scales = torch.ones(plan.rows, device="cuda"), torch.ones(plan.columns, device="cuda")
    coded_bytes = coded.extents(page)[0].coded_bytes

    def run() -> list[Tensor]:
        return [coded.coded_linear(x, page, 0, *scales) for page in pages]

    run()
    return Round(run, plan.experts * (coded_bytes + token_bytes(plan, x)))


def dense_round(plan: Plan, weights: list[Tensor], x: Tensor) -> Round:
    return Round(
        lambda: [torch.nn.functional.linear(x, weight) for weight in weights],
        plan.experts * (weights[0].nbytes + token_bytes(plan, x)),
    )


def copy_round(moved_bytes: int) -> Round:
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    return Round(lambda: to.copy_(source), 2 * source.nbytes)


def token_bytes(plan: Plan, x: Tensor) -> int:
    return x.shape[0] * (plan.rows + plan.columns) * x.element_size()


def captured(one: Round) -> Round:
    """Return the same round as a CUDA graph."""
    one.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = one.run()

    def replay() -> Any:
        graph.replay()
        return kept  # the graph writes there

    return Round(replay, one.moved_bytes)


def seconds_of(one: Round) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    one.run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_pair(plan: Plan, ours: Round, dense: Round, copy: Round) -> dict[str, Any]:
    """Let all three take turns."""
    for one in (ours, dense, copy):
        seconds_of(one)
    turns = [(seconds_of(ours), seconds_of(dense), seconds_of(copy)) for _ in range(plan.rounds)]
    rates = [
        (ours.moved_bytes / mine, dense.moved_bytes / theirs, copy.moved_bytes / copied)
        for mine, theirs, copied in turns
    ]
    return {
        "microseconds_each": spread([mine / plan.experts * 1e6 for mine, _, _ in turns]),
        "cublas_microseconds_each": spread([theirs / plan.experts * 1e6 for _, theirs, _ in turns]),
        "speedup": spread([theirs / mine for mine, theirs, _ in turns]),
        "share_of_copy": spread([mine / copied for mine, _, copied in rates]),
        "cublas_share_of_copy": spread([theirs / copied for _, theirs, copied in rates]),
    }


def measure_coder(plan: Plan, values: Tensor, weights: list[Tensor], coder: str) -> dict[str, Any]:
    rows = {}
    for tokens in plan.tokens:
        x = torch.randn(tokens, plan.columns, device="cuda", dtype=torch.bfloat16)
        ours, dense = coded_round(plan, values, coder, x), dense_round(plan, weights, x)
        copy = copy_round(dense.moved_bytes)
        rows[str(tokens)] = {
            "eager": measure_pair(plan, ours, dense, copy),
            "graph": measure_pair(plan, captured(ours), captured(dense), copy),
        }
        progress(f"{coder}, {tokens} tokens: {rows[str(tokens)]['graph']['speedup']['median']:.2f} of cuBLAS")
    return rows


def bars_of(products: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge the GPU's time alone."""

    def median(tokens: int, what: str) -> float:
        return float(products[coder][str(tokens)]["graph"][what]["median"])

    coder = CODERS[0]
    slowdown = median(16, "microseconds_each") / median(1, "microseconds_each")
    return [
        at_least(f"{coder}, 1 token: speed over cuBLAS bf16", median(1, "speedup"), MIN_SPEEDUP),
        at_most(f"{coder}, 16 tokens: time over that of 1", slowdown, MAX_SLOWDOWN),
        at_least(f"{coder}, 64 tokens: speed over cuBLAS bf16", median(64, "speedup"), MIN_BATCH_SPEEDUP),
    ]


def measure(plan: Plan, *, is_judged: bool) -> dict[str, Any]:
    values = values_of(plan)
    weights = [values.cuda().bfloat16() for _ in range(plan.experts)]
    products = {coder: measure_coder(plan, values, weights, coder) for coder in CODERS}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = {"name": properties.name, "processors": properties.multi_processor_count, "memory": properties.total_memory}
    return {
        "machine": machine() | {"gpu": gpu, "torch": torch.__version__},
        "plan": asdict(plan) | {"zeros": ZEROS},
        "products": products,
        "bars": bars_of(products) if is_judged else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--smoke", action="store_true", help="small and few; no bar is looked at")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not torch_offload._C.built_with_cuda:
        raise SystemExit("this needs a GPU and the CUDA build: make gpu-bench")
    result = measure(SMOKE if arguments.smoke else Plan(), is_judged=not arguments.smoke)
    emit(result, as_json=arguments.json)
    if not all(bar["holds"] for bar in result["bars"]):
        raise SystemExit("a bar does not hold")


if __name__ == "__main__":
    main()
