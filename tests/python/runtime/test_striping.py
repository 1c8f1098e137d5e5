"""Pages spread over several directories, and nothing else changes."""

import os
from pathlib import Path

import pytest
import torch
from support.paging import assert_bitwise_equal, assert_was_paged
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError
from torch_offload.runtime.preflight import resolve

pytestmark = pytest.mark.any_torch

MIB = 1 << 20


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)])  # files grow by 1 MiB, less than a tenth


def train(module: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    batch = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in module.state_dict().items()}


def nameless_files(directory: Path) -> list[int]:
    """Return the sizes in bytes of the open files without a name that lie in a directory."""
    links = [Path("/proc/self/fd", entry) for entry in os.listdir("/proc/self/fd")]
    targets = {link: os.readlink(link) for link in links if link.is_symlink()}
    return [os.stat(link).st_size for link, target in targets.items() if target.startswith(f"{directory.resolve()}/#")]


def test_pages_spread_over_the_directories(scratch: Path) -> None:
    """The same bits come out, and no directory held a tenth more than another."""
    places = [scratch / name for name in ("first", "second", "third")]
    for place in places:
        place.mkdir()
    expected = train(make_module(), 3)
    module = make_module()
    config = Config(ram=24 * MIB, ssd=places, page_elements=1 << 16)
    torch_offload.wrap(module, config=config)
    assert_bitwise_equal(train(module, 3), expected)
    sizes = [nameless_files(place) for place in places]
    assert [len(found) for found in sizes] == [1, 1, 1]
    held = [found[0] for found in sizes]
    assert max(held) <= 1.1 * min(held), held
    assert sum(held) >= torch_offload.report().ssd_bytes
    assert_was_paged()
    torch_offload.unwrap(module)


def test_a_directory_that_cannot_be_used_is_named(scratch: Path) -> None:
    """Every directory is checked before anything is paged."""
    missing = scratch / "missing"
    with pytest.raises(ConfigError, match=f"ssd: {missing}"):
        torch_offload.wrap(make_module(), config=Config(ram=8 * MIB, ssd=[scratch, missing]))


@pytest.mark.parametrize(("local_rank", "directory"), [("1", "disk1"), ("-1", "disk0")])
def test_a_directory_of_the_process_is_named_by_its_number(scratch: Path, monkeypatch, local_rank, directory) -> None:
    """Pages go there, and a second module with the same settings joins."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    (scratch / directory).mkdir()
    config = Config(ram=24 * MIB, ssd=scratch / "disk{local_rank}", page_elements=1 << 16)
    modules = [torch_offload.wrap(make_module(), config=config) for _ in range(2)]
    train(modules[0], 1)
    assert_was_paged()
    assert [size > 0 for size in nameless_files(scratch / directory)] == [True]
    for module in modules:
        torch_offload.unwrap(module)


@pytest.mark.parametrize(
    ("local_rank", "name", "second", "is_said"),
    [
        ("0", "disk{local_rank}", "disk", True),
        ("1", "disk{local_rank}", "disk", False),
        ("0", "disk{local_rank}", "/dev/shm", False),
        ("0", "disk{local_rank}", "missing", False),
        ("0", "disk0", "disk", False),
    ],
)
def test_disks_of_their_own_that_are_one_are_said(scratch, monkeypatch, caplog, local_rank, name, second, is_said):
    """By the first of a machine's processes, where `ssd` names a directory for each."""
    for folder in ("disk", "disk0"):
        (scratch / folder).mkdir()
    (scratch / "disk1").symlink_to(scratch / second)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    resolve(Config(ram=24 * MIB, ssd=scratch / name))
    said = [record.getMessage() for record in caplog.records if "file system" in record.getMessage()]
    assert len(said) == is_said
    assert all(f"processes 0 and 1 have directories on one file system, {scratch}/disk0" in line for line in said)
