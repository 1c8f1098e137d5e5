"""One of two ranks over gloo that begin each collective on paged tensors, whose pages are sent away at once.

Reads one command per line from stdin and answers each with a JSON line: "exercise" runs the next collective, in memory
once and paged many times. Both ranks have the same ones in the same order.
"""

import argparse
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness.ranks import add_rank_options, join_group
from harness.worker_process import serve
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_offload
from torch_offload import Config

NAMESPACES = ("c10d", "_c10d_functional")
ELEMENTS = 1 << 16
BUDGET_BYTES = 32 << 20
MAX_DELAY_SECONDS = 0.002
functional = torch.ops._c10d_functional


class Tensors(nn.Module):
    """What collectives of two ranks use, and whether these are waited for later."""

    def __init__(self, rank: int, *, is_async: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.is_async = is_async
        self.peer = 1 - rank
        generator = torch.Generator().manual_seed(rank)
        for name, count in (("one", 1), ("two", 1), ("wide", 2), ("wide_too", 2)):
            self.register_buffer(name, torch.randn(count * ELEMENTS, generator=generator))

    def assign(self, other: "Tensors") -> None:
        """Take the numbers of others over."""
        for mine, theirs in zip(self.buffers(), other.buffers(), strict=True):
            mine.copy_(theirs)

    def at_first(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """Return what only the first rank has."""
        return tensors if self.rank == 0 else None


Begin = Callable[[Tensors], Any]
"""Begins a collective on the tensors, and returns what waits for it or what it made."""


def send_or_receive(source: int | None) -> Begin:
    def begin(of: Tensors) -> Any:
        if of.rank == 1:
            return (dist.isend if of.is_async else dist.send)(of.one, 0)
        return (dist.irecv if of.is_async else dist.recv)(of.one, source)

    return begin


def coalesced(begin_each: Callable[[Tensors], Any]) -> Begin:
    def begin(of: Tensors) -> Any:
        with dist._coalescing_manager(async_ops=of.is_async) as begun:
            begin_each(of)
        return begun if of.is_async else None

    return begin


def halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(2))


def reduce_both(of: Tensors) -> None:
    dist.all_reduce(of.one)
    dist.all_reduce(of.wide)


def gather_both(of: Tensors) -> None:
    dist.all_gather_into_tensor(of.wide, of.one)
    dist.all_gather_into_tensor(of.wide_too, of.two)


def scatter_both(of: Tensors) -> None:
    dist.reduce_scatter_tensor(of.one, of.wide)
    dist.reduce_scatter_tensor(of.two, of.wide_too)


C10D: dict[str, Begin] = {
    "broadcast_": lambda of: dist.broadcast(of.one, 1, async_op=of.is_async),
    "allreduce_": lambda of: dist.all_reduce(of.one, async_op=of.is_async),
    "allreduce_coalesced_": coalesced(reduce_both),
    "allgather_": lambda of: dist.all_gather(halves(of.wide), of.one, async_op=of.is_async),
    "_allgather_base_": lambda of: dist.all_gather_into_tensor(of.wide, of.one, async_op=of.is_async),
    "allgather_coalesced_": lambda of: dist.all_gather_coalesced(
        [[of.one, of.two], halves(of.wide)], halves(of.wide_too), async_op=of.is_async
    ),
    "allgather_into_tensor_coalesced_": coalesced(gather_both),
    "reduce_scatter_": lambda of: dist.reduce_scatter(of.one, halves(of.wide), async_op=of.is_async),
    "_reduce_scatter_base_": lambda of: dist.reduce_scatter_tensor(of.one, of.wide, async_op=of.is_async),
    "reduce_scatter_tensor_coalesced_": coalesced(scatter_both),
    "reduce_": lambda of: dist.reduce(of.one, 0, async_op=of.is_async),
    "gather_": lambda of: dist.gather(of.one, of.at_first(halves(of.wide)), async_op=of.is_async),
    "scatter_": lambda of: dist.scatter(of.one, of.at_first(halves(of.wide)), async_op=of.is_async),
    "alltoall_base_": lambda of: dist.all_to_all_single(of.wide, of.wide_too, async_op=of.is_async),
    "alltoall_": lambda of: dist.all_to_all([of.one, of.two], halves(of.wide), async_op=of.is_async),
    "send": send_or_receive(1),
    "recv_": send_or_receive(1),
    "recv_any_source_": send_or_receive(None),
}
GROUP = "0"  # what torch calls the first group
FUNCTIONAL: dict[str, Begin] = {
    "all_reduce": lambda of: functional.all_reduce(of.one, "sum", GROUP),
    "all_reduce_": lambda of: functional.all_reduce_(of.one, "sum", GROUP),
    "all_reduce_coalesced": lambda of: functional.all_reduce_coalesced([of.one, of.wide], "sum", GROUP),
    "all_reduce_coalesced_": lambda of: functional.all_reduce_coalesced_([of.one, of.wide], "sum", GROUP),
    "all_gather_into_tensor": lambda of: functional.all_gather_into_tensor(of.one, 2, GROUP),
    "all_gather_into_tensor_out": lambda of: functional.all_gather_into_tensor_out(of.one, 2, GROUP, out=of.wide),
    "all_gather_into_tensor_coalesced": lambda of: functional.all_gather_into_tensor_coalesced(
        [of.one, of.two], 2, GROUP
    ),
    "reduce_scatter_tensor": lambda of: functional.reduce_scatter_tensor(of.wide, "sum", 2, GROUP),
    "reduce_scatter_tensor_out": lambda of: functional.reduce_scatter_tensor_out(of.wide, "sum", 2, GROUP, out=of.one),
    "reduce_scatter_tensor_coalesced": lambda of: functional.reduce_scatter_tensor_coalesced(
        [of.wide, of.wide_too], "sum", 2, GROUP
    ),
    "all_to_all_single": lambda of: functional.all_to_all_single(of.wide, [ELEMENTS] * 2, [ELEMENTS] * 2, GROUP),
    "broadcast": lambda of: functional.broadcast(of.one, 1, GROUP),
    "broadcast_": lambda of: functional.broadcast_(of.one, 1, GROUP),
    "isend": lambda of: (
        functional.isend(of.one, 0, 0, GROUP) if of.rank == 1 else functional.irecv(of.one, 1, 0, GROUP)
    ),
    "irecv": lambda of: (
        functional.isend(of.one, 0, 0, GROUP) if of.rank == 1 else functional.irecv(of.one, 1, 0, GROUP)
    ),
    "batch_p2p_ops": lambda of: functional.batch_p2p_ops(
        ["isend", "irecv"], [of.peer, of.peer], [0, 0], [of.one, of.two], GROUP
    ),
}
FUNCTIONAL["wait_tensor"] = FUNCTIONAL["all_reduce"]
NOT_EXERCISED = ("c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan")  # they send no tensor of a script


def settle(begun: Any) -> list[Tensor]:
    """Wait for what was begun and return what it made."""
    if isinstance(begun, Tensor):
        return [functional.wait_tensor(begun)]
    if isinstance(begun, list):
        return [made for each in begun for made in settle(each)]
    if begun is not None and not isinstance(begun, int):
        begun.wait()
    return []


def at_once_or_later(begin: Begin) -> Begin:
    return lambda of: begin(of) if of.is_async else settle(begin(of))


def registered() -> list[str]:
    """Return the names of all collectives of this torch."""
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return sorted({name for name in names if name.partition("::")[0] in NAMESPACES})


def all_collectives() -> dict[str, Begin]:
    """Return those that are exercised, by name."""
    known = {f"c10d::{name}": begin for name, begin in C10D.items()}
    known |= {f"_c10d_functional::{name}": at_once_or_later(begin) for name, begin in FUNCTIONAL.items()}
    return {name: known[name] for name in registered() if name in known}


class Recorded(TorchDispatchMode):
    """Notes the names of operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.name().partition(".")[0])
        return function(*args, **(kwargs or {}))


class Collectives:
    """One process of the group.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, on collectives that it will drop
        join_group(options)
        self.rank, self.repeats = options.rank, options.repeats
        self.scratch = tempfile.TemporaryDirectory(dir=options.ssd)
        self.config = Config(ram=BUDGET_BYTES, ssd=self.scratch.name, page_elements=1 << 14, min_paged_bytes=0)
        self.engine = torch_offload.wrap(nn.Linear(1, 1), config=self.config)  # it lives as long as what is wrapped
        self.cases = iter(
            [(name, begin, later) for name, begin in all_collectives().items() for later in (False, True)]
        )

    def describe(self) -> dict[str, Any]:
        known = all_collectives()
        missing = [name for name in registered() if name not in known and name not in NOT_EXERCISED]
        return {"cases": 2 * len(known), "not_exercised": missing}

    def exercise(self) -> dict[str, Any]:
        """Run the next collective; `called` says whether it came to the operator of that name on this rank.

        Each has tensors of its own: `isend` of torch 2.13 leaves a wait with its argument that never ends.
        """
        name, begin, is_async = next(self.cases)
        plain, paged = (
            Tensors(self.rank, is_async=is_async),
            torch_offload.wrap(Tensors(self.rank, is_async=is_async), config=self.config),
        )
        with Recorded() as recorded:
            made = settle(begin(plain))
        delays = random.Random(f"{name} {is_async} {self.rank}")
        runs = list(self.run_paged(paged, delays, lambda: begin(paged), [*plain.buffers(), *made]))
        torch_offload.unwrap(paged)
        return {
            "operator": name,
            "is_async": is_async,
            "called": name in recorded.names,
            "runs": len(runs),
            "different": sum(not is_equal for is_equal, _ in runs),
            "stayed": sum(stayed_bytes > 0 for _, stayed_bytes in runs),
            **self.figures(),
        }

    def run_paged(
        self, paged: Tensors, delays: random.Random, begin: Callable[[], Any], expected: list[Tensor]
    ) -> Iterator[tuple[bool, int]]:
        """Yield of each run whether it has the expected bits, and how many bytes were in use as pages had to leave."""
        first = Tensors(self.rank)
        for _ in range(self.repeats):
            paged.assign(first)
            torch_offload.evict(paged)
            time.sleep(delays.uniform(0, MAX_DELAY_SECONDS))  # so that ranks begin and wait in every order
            begun = begin()
            stayed_bytes = torch_offload.evict(paged)
            time.sleep(delays.uniform(0, MAX_DELAY_SECONDS))
            made = settle(begun)
            found = [*paged.buffers(), *made]
            yield all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), stayed_bytes

    def figures(self) -> dict[str, Any]:
        """Return what shows that it paged."""
        report = torch_offload.report()
        return {"faults": report.faults, "evictions": report.evictions, "misses": report.misses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--repeats", type=int, required=True, help="paged runs of each collective, with other delays")
    serve(lambda: Collectives(parser.parse_args()))


if __name__ == "__main__":
    main()
