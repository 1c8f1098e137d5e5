"""Ranks that differ are warned of it, all of them and once. Method: two ranks over gloo that train with DDP."""

import logging
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from support.collectives import in_each_rank, join_group
from torch import nn

import torch_offload

STEPS = 3


def train(rank: int, folder: str, rams: tuple[str, str], capabilities: tuple[str, str]) -> str:
    """Return what was said at the level of warnings."""
    torch.backends.cpu.get_cpu_capability = lambda: capabilities[rank]
    join_group(rank, folder)
    usual = dist.distributed_c10d._get_default_store().timeout
    said = StringIO()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.WARNING)
    logging.getLogger("torch_offload").addHandler(handler)
    module = torch_offload.wrap(nn.Linear(64, 64), ram=rams[rank], ssd=folder)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(STEPS):
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.distributed_c10d._get_default_store().timeout == usual
    del model  # torch 2.13 may wait for ever where its reducer is the last to have the group
    dist.destroy_process_group()
    return "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith("ranks "))


@pytest.mark.parametrize(
    ("rams", "capabilities", "difference"),
    [
        (("32MiB", "64MiB"), ("AVX512", "AVX512"), "ram "),
        (("64MiB", "64MiB"), ("AVX512", "AVX2"), "instructions of the CPU AVX"),
    ],
)
def test_all_ranks_say_once_what_differs(scratch, rams, capabilities, difference):
    first, second = in_each_rank(train, str(scratch), rams, capabilities)
    assert first == second
    (line,) = first.splitlines()
    assert f"differ: {difference}" in line


@pytest.mark.parametrize("ram", ["64MiB", "60MiB"])
def test_ranks_that_are_alike_say_nothing(scratch, ram):
    """Nor do those whose budgets differ by what was free as they started."""
    assert in_each_rank(train, str(scratch), ("64MiB", ram), ("AVX512", "AVX512")) == ["", ""]
