"""Turns of a small network, resident and paged: what pages cost the processor, as a JSON line.

    python -m torch_offload.diagnostics.paging_turns DIRECTORY

A small network computes by rounds in a budget that holds it and in one that does not, with so many rows that a disk
need not be waited for: what the latter takes longer is what requests, checksums and memory of its pages cost. The
threads of a matrix product wait for each other, so a core that one of them loses is lost to all. A frozen network only
reads; one that is trained writes as much as it reads.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from torch_offload.diagnostics.paging_cost import PagingCost
from torch_offload.runtime.api import report, unwrap, wrap
from torch_offload.system.terminal import echo

WIDTH = 768  # of layers as a small model has them: weights of several pages, and of less than one
WIDER = 4 * WIDTH
ROWS = 256
READ_BLOCKS = 12
TRAINED_BLOCKS = 6
READ_BUDGET_BYTES = 128 << 20
TRAINED_BUDGET_BYTES = 250 << 20
AMPLE_BUDGET_BYTES = 1 << 30
ROUNDS = 2
WARM_UP = 3
TURNS = 9


def measure_here(directory: str) -> PagingCost:
    """Measure in this process, which must have nothing wrapped."""
    seconds, read_bytes, _ = _added(_forward(READ_BLOCKS), READ_BUDGET_BYTES, directory)
    read = max(0.0, seconds / read_bytes)
    seconds, read_bytes, written_bytes = _added(_training(TRAINED_BLOCKS), TRAINED_BUDGET_BYTES, directory)
    return PagingCost(read=read, written=max(0.0, (seconds - read * read_bytes) / written_bytes))


Turn = tuple[nn.Module, Callable[[], object]]


def _network(blocks: int) -> nn.Sequential:
    def block() -> list[nn.Module]:
        sizes = [(WIDTH, WIDER), (WIDER, WIDTH), (WIDTH, WIDTH)]
        first, *others = (nn.Linear(inputs, outputs, bias=False) for inputs, outputs in sizes)
        return [first, nn.SiLU(), *others]

    return nn.Sequential(*(layer for _ in range(blocks) for layer in block()))


def _forward(blocks: int) -> Turn:
    network = _network(blocks).requires_grad_(requires_grad=False)
    rows = torch.rand(ROWS, WIDTH)

    @torch.no_grad()
    def forward() -> None:
        network(rows)

    return network, forward


def _training(blocks: int) -> Turn:
    network = _network(blocks)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    rows = torch.rand(ROWS, WIDTH)

    def step() -> None:
        network(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return network, step


class _Turns:
    """Turns in one budget, measured."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.read: list[int] = []
        self.written: list[int] = []

    def add(self, turn: Turn, budget_bytes: int, directory: str) -> None:
        """Wrap, take turns until they are alike, and some that count; unwrap."""
        network, work = turn
        wrap(network, ram=budget_bytes, ssd=directory)
        for _ in range(WARM_UP):
            work()
        for _ in range(TURNS):
            before = report()
            started = time.perf_counter()
            work()
            self.seconds.append(time.perf_counter() - started)
            after = report()
            self.read.append(after.ssd_read_bytes - before.ssd_read_bytes)
            self.written.append(after.ssd_written_bytes - before.ssd_written_bytes)
        unwrap(network)


def _added(turn: Turn, budget_bytes: int, directory: str) -> tuple[float, float, float]:
    """Return by how many seconds a turn in the budget is longer, and the bytes that it reads and writes: medians."""
    resident, paged = _Turns(), _Turns()
    for _ in range(ROUNDS):
        resident.add(turn, AMPLE_BUDGET_BYTES, directory)
        paged.add(turn, budget_bytes, directory)
    return median(paged.seconds) - median(resident.seconds), median(paged.read), median(paged.written)


if __name__ == "__main__":
    echo(measure_here(sys.argv[1]).model_dump_json())
