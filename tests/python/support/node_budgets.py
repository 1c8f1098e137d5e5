"""Ranks of one machine that share its budget, each with a model of its own size."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_offload
from support.bits import digest
from support.collectives import RANKS, join_group
from torch_offload import _C, Config
from torch_offload.runtime.process import PROCESS
from torch_offload.system import node_ledger, resources
from torch_offload.system.node_ledger import NodeLedger

WIDTH, ROWS, STEPS = 128, 32, 3
LAYER_STATE_BYTES = 4 * 4 * WIDTH * WIDTH
"""Of a layer: weight, gradient and two moments."""
LAYERS = (80, 8)
"""Of the first rank, whose state is one and a half of the budget, and of the second, which has less than its part."""
BUDGET_BYTES = 14 << 20
PATIENCE_SECONDS = 60


@dataclass
class Outcome:
    """One rank's: digests of all that training changes, in memory and paged, and the report of the latter."""

    plain: list[str]
    paged: list[str]
    report: dict[str, Any]


def become_rank(rank: int, folder: str) -> None:
    """Be what a launcher would have started, on a machine of little memory."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": folder,
    }
    torch.set_num_threads(1)
    resources.default_ram_bytes = lambda: BUDGET_BYTES


def make_model(layers: int) -> nn.Sequential:
    torch.manual_seed(layers)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def wrapped(model: nn.Sequential, folder: str) -> nn.Sequential:
    return torch_offload.wrap(model, ssd=folder, config=Config(page_elements=1 << 13, min_paged_bytes=1 << 14))


def steps_of(model: nn.Sequential) -> Iterator[None]:
    """Train; each step the ranks add up their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    numbers = torch.Generator().manual_seed(3)
    while True:
        value = torch.randn(ROWS, WIDTH, generator=numbers)
        for layer in model:
            value = value + layer(value) / len(model)
        loss = value.square().mean()
        loss.backward()
        if dist.is_initialized():
            dist.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        yield


def trained(model: nn.Sequential) -> list[str]:
    steps = steps_of(model)
    for _ in range(STEPS):
        next(steps)
    return [digest(parameter.detach()) for parameter in model.parameters()]


def train(rank: int, folder: str) -> Outcome:
    """Train in memory, then paged, without `ram`."""
    join_group(rank, folder)
    plain = trained(make_model(LAYERS[rank]))
    become_rank(rank, folder)
    model = wrapped(make_model(LAYERS[rank]), folder)
    dist.barrier()  # before all have come a part is the limit
    paged = trained(model)
    report = torch_offload.report().to_dict()
    dist.barrier()  # what the others report is of a time when all were there
    dist.destroy_process_group()
    return Outcome(plain, paged, report)


def _wait_for(file: Path) -> str:
    until = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} did not come"
        time.sleep(0.01)  # the other process does something meanwhile
    return file.read_text()


def _say(file: Path, text: str) -> None:
    unfinished = file.with_suffix(".new")
    unfinished.write_text(text)
    unfinished.rename(file)


def be_killed(folder: str) -> None:
    """Take a part of the budget, say what it is, and end as on `kill -9`."""
    become_rank(1, folder)
    _wait_for(Path(folder, "joined"))
    model = wrapped(make_model(LAYERS[0]), folder)
    next(steps_of(model))
    share = torch_offload.report().share
    assert share is not None
    _say(Path(folder, "leased"), json.dumps(asdict(share)))
    os.kill(os.getpid(), signal.SIGKILL)


def report_beside_all_ranks(folder: str) -> torch_offload.Report:
    """Wrap a model where every rank has its share already."""
    become_rank(0, folder)
    ledger = _C.BudgetLedger.make(name="test", budget_bytes=BUDGET_BYTES, rank_count=RANKS)
    ranks = [
        _C.Engine(
            budget_bytes=ledger.equal_bytes,
            directories=[folder],
            io_engine="auto",
            queue_depth=8,
            page_elements=1 << 13,
            min_paged_bytes=0,
            ledger=ledger,
            guaranteed_bytes=1 << 20,
        )
        for _ in range(RANKS)
    ]
    node_ledger.join = lambda *_, **options: NodeLedger(ledger, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    model = wrapped(make_model(LAYERS[1]), folder)
    report = torch_offload.report()
    del model, ranks
    return report


def outlive(folder: str, steps: int) -> tuple[dict[str, int], dict[str, int]]:
    """Train until there is more memory than the killed rank left, `steps` times at most. Return both shares."""
    become_rank(0, folder)
    model = wrapped(make_model(LAYERS[0]), folder)
    _say(Path(folder, "joined"), "")
    theirs = json.loads(_wait_for(Path(folder, "leased")))
    left_bytes = theirs["shared_bytes"] - theirs["guaranteed_bytes"] - theirs["leased_bytes"]
    running = steps_of(model)
    for _ in range(steps):
        next(running)
        share = PROCESS.session.statistics()["share"]
        if share["guaranteed_bytes"] + share["leased_bytes"] > left_bytes:
            break
    return share, theirs
