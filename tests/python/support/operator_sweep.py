"""A worker of the operator sweep: calls operators with arguments paged out and compares every bit with plain torch.

The operators that each call leads to, with all arguments paged out, are compared as well: torch's profiler lists them.

    python -m support.operator_sweep --shard 0 --shards 2 --scratch DIRECTORY [--start 17] [--plain] [--device cuda]

Prints a JSON line before each operator and one with its tally after it, so that a crash names the operator. --plain
leaves everything in memory: the harness then compares plain torch with itself.
"""

import argparse
import ctypes
import faulthandler
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves

from support.bits import fingerprint
from support.operator_calls import Call, calls_of, is_tensor

OPERATOR_SECONDS = 120
GPU_BYTES = 256 << 20
MALLOPT_PERTURB = -6  # M_PERTURB of mallopt(3): the byte that freed and new memory is filled with
FILLS = itertools.cycle(range(1, 255, 7))


@dataclass
class Tally:
    """What became of the calls of one operator."""

    operator: str
    calls: int = 0
    paged_calls: int = 0
    unstable_calls: int = 0  # plain torch disagrees with itself
    listed_calls: int = 0  # the operators below were compared
    refused: list[str] = field(default_factory=list)  # typed errors
    problems: list[str] = field(default_factory=list)


class PlainEngine:
    """Stands in for the engine: everything stays where it is."""

    refusals: tuple[type[Exception], ...] = ()

    def manage(self, tensor: torch.Tensor) -> None: ...

    def evict(self, tensor: torch.Tensor) -> None: ...

    def statistics(self) -> dict[str, object]:
        return {}


class PagingEngine:
    """The engine, with pages of one sector."""

    def __init__(self, scratch: str, device: str) -> None:
        import torch_offload
        from torch_offload import _C
        from torch_offload.system.gpu import MIN_PAGE_ELEMENTS

        self.refusals = (torch_offload.OffloadError,)
        is_gpu = device == "cuda"
        self.engine = _C.Engine(
            budget_bytes=GPU_BYTES if is_gpu else 64 << 20,
            directories=[scratch],
            io_engine="auto",
            queue_depth=8,
            page_elements=MIN_PAGE_ELEMENTS if is_gpu else 4096,
            min_paged_bytes=0,
            device_bytes=GPU_BYTES if is_gpu else 0,
            device_kind="cuda" if is_gpu else "emulated",
        )

    def manage(self, tensor: torch.Tensor) -> None:
        assert self.engine.manage(tensor, kind="other", label="argument")

    def evict(self, tensor: torch.Tensor) -> None:
        self.engine.evict(tensor)
        assert not self.engine.is_resident(tensor)

    def statistics(self) -> dict[str, object]:
        return self.engine.statistics()


Engine = PlainEngine | PagingEngine


def fill_freed_memory() -> None:
    """Make uninitialized memory differ from run to run, so that an operator that shows it is seen to be unstable."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MALLOPT_PERTURB, next(FILLS))


def gradients(result: Any, leaves: list[Any], engine: Engine, paged: list[torch.Tensor]) -> Any:
    """Differentiate by every argument that asks for it, with arguments paged out again before backward."""
    outputs = [leaf for leaf in tree_leaves(result) if is_tensor(leaf) and leaf.requires_grad]
    inputs = [leaf for leaf in leaves if is_tensor(leaf) and leaf.requires_grad]
    if not outputs or not inputs:
        return []
    torch.manual_seed(1)
    directions = [torch.randn(output.shape, dtype=output.dtype, device=output.device) for output in outputs]
    for tensor in paged:
        engine.evict(tensor)
    return torch.autograd.grad(outputs, inputs, directions, allow_unused=True)


def paged_leaves(call: Call, engine: Engine, positions: list[int]) -> tuple[list[Any], list[Any]]:
    """Return copies of the call's leaves, and those at `positions` of them, which are paged out."""
    leaves = call.copy_leaves()
    paged = [leaves[position] for position in positions]
    for tensor in paged:
        engine.manage(tensor)
        engine.evict(tensor)
    torch.manual_seed(0)
    return leaves, paged


def observe(call: Call, engine: Engine, positions: list[int]) -> list[Any]:
    """Run the call with the arguments at `positions` paged out; describe result, gradients and arguments after it."""
    fill_freed_memory()
    leaves, paged = paged_leaves(call, engine, positions)
    result = call.run(leaves)
    derived = gradients(result, leaves, engine, paged) if call.with_grad else []
    seen = []
    for value in (result, derived, leaves):
        for tensor in paged:
            engine.evict(tensor)
        seen.append(fingerprint(value))
    return seen


def operators_below(call: Call, engine: Engine, positions: list[int]) -> Counter[str]:
    """Run the call as `observe` does and count the operators that were dispatched until it and its backward ended."""
    leaves, paged = paged_leaves(call, engine, positions)
    with torch.autograd.profiler.profile() as profile:
        result = call.run(leaves)
        if call.with_grad:
            gradients(result, leaves, engine, paged)
    events = profile.kineto_results.events()  # as they came: `function_events` leaves some out, by what else is there
    return Counter(event.name() for event in events if not event.name().startswith("torch_offload::"))


def compare_operators(call: Call, engine: Engine, tally: Tally) -> None:
    """Note where a call leads to other operators once its arguments are paged."""
    positions = call.pageable()
    if not positions:
        return
    try:
        expected = operators_below(call, PlainEngine(), [])
    except Exception:  # noqa: BLE001 (whatever it raises, `outcome` compares)
        return
    seen = operators_below(call, engine, positions)
    tally.listed_calls += 1
    if seen != expected:
        tally.problems.append(f"{call.name}: also {seen - expected}, not {expected - seen}")


def outcome(call: Call, engine: Engine, positions: list[int]) -> list[Any]:
    """Observe the call; an error counts as an outcome, by its type."""
    try:
        return observe(call, engine, positions)
    except engine.refusals as error:
        return ["refused", f"{type(error).__name__}: {error}"]
    except Exception as error:  # noqa: BLE001 (whatever plain torch raises, paged must raise too)
        return ["raised", type(error).__name__]


def is_stable(call: Call, expected: list[Any], runs: int) -> bool:
    return all(outcome(call, PlainEngine(), []) == expected for _ in range(runs))


def selections(positions: list[int]) -> Iterator[list[int]]:
    """Each argument by itself, then all together."""
    yield from ([position] for position in positions)
    if len(positions) > 1:
        yield positions


def check(call: Call, engine: Engine, tally: Tally) -> None:
    tally.calls += 1
    expected = outcome(call, PlainEngine(), [])
    stable = is_stable(call, expected, runs=1)
    for positions in selections(call.pageable()):
        tally.paged_calls += 1
        seen = outcome(call, engine, positions)
        where = f"{call.name}, paged out: {positions}"
        if seen[0] == "refused":
            tally.refused.append(f"{where}: {seen[1]}")
        elif stable and seen != expected:
            stable = is_stable(call, expected, runs=8)
            if stable:
                tally.problems.append(f"{where}: {differences(seen, expected)}")
    tally.unstable_calls += not stable
    compare_operators(call, engine, tally)


def differences(seen: list[Any], expected: list[Any]) -> str:
    if "raised" in (seen[0], expected[0]):
        return (
            f"{seen if seen[0] == 'raised' else 'a result'} instead of {expected if expected[0] == 'raised' else 'one'}"
        )
    parts = ("result", "gradients", "arguments afterwards")
    return "wrong " + ", ".join(name for name, a, b in zip(parts, seen, expected, strict=True) if a != b)


def operators(device: str) -> list[OpInfo]:
    """Every operator of torch's test database that runs on the device."""
    return [operator for operator in op_db if operator.supported_dtypes(device)]


def sweep(operator: OpInfo, engine: Engine, device: str) -> Tally:
    tally = Tally(operator.formatted_name)
    faulthandler.dump_traceback_later(OPERATOR_SECONDS, exit=True)
    for call in calls_of(operator, device):
        check(call, engine, tally)
    faulthandler.cancel_dump_traceback_later()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="position in the shard to start at")
    parser.add_argument("--only", help="substring of the operators' names")
    parser.add_argument("--scratch", default=".")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--without", nargs="*", default=(), help="names of operators that are left out")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    engine = PlainEngine() if options.plain else PagingEngine(options.scratch, options.device)
    for position, operator in enumerate(operators(options.device)[options.shard :: options.shards]):
        if operator.formatted_name in options.without:
            continue
        if position < options.start or (options.only or "") not in operator.formatted_name:
            continue
        emit({"position": position, "operator": operator.formatted_name})
        emit(
            {
                "position": position,
                "tally": asdict(sweep(operator, engine, options.device)),
                "statistics": engine.statistics(),
            }
        )


def emit(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
