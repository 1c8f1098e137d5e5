"""How far scratch files may grow: beyond it the disk counts as full, and nothing is lost."""

import errno
import logging
import os

import pytest
import torch
from support.bits import digest
from torch import nn

import torch_offload
from torch_offload import Config, TierIOError

MIB = 1 << 20


def make_module() -> nn.Sequential:
    """Weights of 4 MiB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))


def train(module: nn.Module, *, steps: int) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    for _ in range(steps):
        module(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_from(loss: torch.Tensor, module: nn.Module) -> None:
    loss.backward()
    train(module, steps=1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ram": 2 * MIB, "max_spill": 3 * MIB, "keep_free": 0}, "it may have 3145728; give a larger max_spill"),
        ({"ram": 6 * MIB, "keep_free": 1 << 60}, f"{1 << 60} are kept free; free space there, lower keep_free"),
    ],
)
def test_growth_beyond_the_limit_is_a_full_disk(scratch, settings, named):
    """Method: room for the weights and not for training; then the weights have the bits that they had."""
    module = make_module()
    whole = [digest(weight) for weight in module.parameters()]
    torch_offload.wrap(module, config=Config(ssd=scratch, page_elements=4096, min_paged_bytes=0, **settings))
    loss = module(torch.ones(2, 256)).sum()
    with pytest.raises(TierIOError, match=rf"cannot grow .* by 16384 bytes .*{named}.*; nothing is lost") as full:
        train_from(loss, module)
    assert full.value.errno == errno.ENOSPC
    assert torch_offload.report().ssd_file_bytes <= 3 * MIB
    del loss
    for weight in module.parameters():
        weight.grad = None
    torch_offload.unwrap(module)
    assert [digest(weight) for weight in module.parameters()] == whole


def test_training_below_the_limits_is_exact(scratch):
    """Method: a run in memory and one with both limits."""
    digests = []
    for is_paged in (False, True):
        module = make_module()
        if is_paged:
            config = Config(ram=4 * MIB, ssd=[scratch, scratch], page_elements=4096, min_paged_bytes=0)
            torch_offload.wrap(module, config=config.replace(keep_free="1MiB", max_spill="64MiB"))
        train(module, steps=2)
        if is_paged:
            assert torch_offload.report().ssd_written_bytes > 0
            assert torch_offload.report().ssd_file_bytes <= 64 * MIB
            torch_offload.unwrap(module)
        digests.append([digest(weight) for weight in module.parameters()])
    assert digests[0] == digests[1]


def test_a_directory_that_is_not_safe_is_said_at_wrap(scratch, caplog):
    """Once, and only of the one."""
    shared = scratch / "shared"
    shared.mkdir()
    os.chmod(shared, 0o777)
    with caplog.at_level(logging.WARNING, logger="torch_offload"):
        torch_offload.wrap(make_module(), config=Config(ram="8MiB", ssd=[scratch, shared], keep_free=0))
    assert [record.getMessage() for record in caplog.records] == [
        f"ssd: anybody may rename what is in {shared}: it has no sticky bit; chmod +t it, or name another directory"
    ]
