"""Collectives of two processes on tensors whose pages are sent away while they are under way."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from support.bits import digest
from support.isolation import in_child
from torch_offload import _C

RANKS = 2
ELEMENTS = 1 << 18
BUDGET_BYTES = 8 << 20
PAGE_ELEMENTS = 1 << 14
PATIENCE = timedelta(seconds=60)
MANY = 24
"""Tensors of a mebibyte that take part at once, three times what the budget holds."""


Program = Callable[["Rank"], Iterator[Tensor]]


class Rank:
    """One process of the group, with an engine or without one."""

    def __init__(self, rank: int, engine: Any) -> None:
        self.rank = rank
        self.engine = engine
        self.stayed: list[int] = []
        self._meetings = 0

    def tensor(self, seed: int, elements: int = ELEMENTS) -> Tensor:
        """Numbers of this rank, paged where there is an engine, on the disk at first."""
        tensor = torch.randn(elements, generator=torch.Generator().manual_seed(RANKS * seed + self.rank))
        if self.engine is not None:
            assert self.engine.manage(tensor, kind="parameter", label=f"tensor {seed}")
            self.engine.evict(tensor)
        return tensor

    def begin(self, work: Callable[[], Any], *used: Tensor) -> Any:
        """Begin `work`; where this rank is the first to, have what it uses leave before the other begins."""
        if self.rank != 0:
            self.meet()
        begun = work()
        if self.engine is not None:
            self.stayed.append(sum(self.engine.evict(tensor) for tensor in used))
        if self.rank == 0:
            self.meet()
        return begun

    def meet_when_full(self) -> None:
        """Meet the other once another tensor does not fit."""
        while self.engine is not None and self.engine.statistics()["memory"]["available_bytes"] >= 4 * ELEMENTS:
            time.sleep(0.001)  # between two looks at memory that another thread fills
        self.meet()

    def meet(self) -> None:
        """Wait for the other, by the store: no collective is begun."""
        self._meetings += 1
        mode = "plain" if self.engine is None else "paged"
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{mode} {self._meetings} by {self.rank}", "")
        store.wait([f"{mode} {self._meetings} by {1 - self.rank}"], PATIENCE)


def all_reduce(rank: Rank) -> Iterator[Tensor]:
    tensor = rank.tensor(0)
    for _ in range(4):
        rank.begin(lambda: dist.all_reduce(tensor, async_op=True), tensor).wait()
    yield tensor


def broadcast(rank: Rank) -> Iterator[Tensor]:
    tensor = rank.tensor(0)
    rank.begin(lambda: dist.broadcast(tensor, 1, async_op=True), tensor).wait()
    yield tensor


def all_gather(rank: Rank) -> Iterator[Tensor]:
    tensor, gathered = rank.tensor(0), rank.tensor(1, RANKS * ELEMENTS)
    begun = rank.begin(lambda: dist.all_gather_into_tensor(gathered, tensor, async_op=True), tensor, gathered)
    begun.wait()
    yield gathered


def reduce_scatter(rank: Rank) -> Iterator[Tensor]:
    tensor, part = rank.tensor(0, RANKS * ELEMENTS), rank.tensor(1)
    rank.begin(lambda: dist.reduce_scatter_tensor(part, tensor, async_op=True), tensor, part).wait()
    yield part


def scatter(rank: Rank) -> Iterator[Tensor]:
    """Of paged tensors in a list of lists only, in which the dispatcher looks for no keys."""
    tensor, part = rank.tensor(0, RANKS * ELEMENTS), torch.empty(ELEMENTS)
    parts = list(tensor.chunk(RANKS)) if rank.rank == 0 else None
    rank.begin(lambda: dist.scatter(part, parts, async_op=True), tensor).wait()
    yield part
    yield tensor


def messages(rank: Rank) -> Iterator[Tensor]:
    """Work of gloo that tells nobody when it has ended."""
    tensor = rank.tensor(0)
    for _ in range(2):
        if rank.rank == 0:
            rank.begin(lambda: dist.isend(tensor, 1), tensor).wait()
        else:
            rank.begin(lambda: dist.irecv(tensor, 0), tensor).wait()
    yield tensor


def functional_all_reduce(rank: Rank) -> Iterator[Tensor]:
    tensor = rank.tensor(0)
    reduced = rank.begin(lambda: functional.all_reduce(tensor, "sum", dist.group.WORLD), tensor)
    yield functional.wait_tensor(reduced)
    gathered = rank.begin(lambda: functional.all_gather_tensor(tensor, 0, dist.group.WORLD), tensor)
    yield functional.wait_tensor(gathered)


def synchronous(rank: Rank) -> Iterator[Tensor]:
    tensor = rank.tensor(0)
    dist.all_reduce(tensor)
    yield tensor


def many_at_once(rank: Rank) -> Iterator[Tensor]:
    """As a script does that averages its gradients by itself; the second begins once the first has no memory left."""
    tensors = [rank.tensor(seed) for seed in range(MANY)]
    if rank.rank == 0:
        threading.Thread(target=rank.meet_when_full, daemon=True).start()
    else:
        rank.meet()
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    yield from tensors


@dataclass
class Outcome:
    """One rank's: digests of what the program yields, how many bytes stayed at each eviction, the engine's figures."""

    plain: list[str]
    paged: list[str]
    stayed: list[int]
    stayed_afterwards: list[int]
    statistics: dict[str, Any]


def join_group(rank: int, folder: str, *, ranks: int = RANKS) -> None:
    """Make this process a rank, with one thread."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=ranks, timeout=PATIENCE)


def run(rank: int, program: Program, folder: str) -> Outcome:
    """Run `program` in memory and paged."""
    join_group(rank, folder)
    plain = [digest(tensor) for tensor in program(Rank(rank, None))]
    engine = _C.Engine(
        budget_bytes=BUDGET_BYTES,
        directories=[folder],
        io_engine="auto",
        queue_depth=8,
        page_elements=PAGE_ELEMENTS,
        min_paged_bytes=0,
    )
    engine.install_allocator()
    process = Rank(rank, engine)
    paged, stayed_afterwards = [], []
    for tensor in program(process):
        if _C.is_managed(tensor):
            stayed_afterwards.append(engine.evict(tensor))
        paged.append(digest(tensor))
    dist.destroy_process_group()
    return Outcome(plain, paged, process.stayed, stayed_afterwards, engine.statistics())


def in_each_rank(function: Callable[..., Any], *arguments: Any, ranks: int = RANKS) -> list[Any]:
    """Call ``function(rank, *arguments)`` in a process for each rank."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: in_child(function, rank, *arguments), range(ranks)))


def run_ranks(program: Program, folder: Path) -> list[Outcome]:
    """Run `program` in a process for each rank."""
    return in_each_rank(run, program, str(folder))
