"""Files of models that do not fit in memory: the library's bytes, within the budget, complete or not there.

Method: tiny models under a budget below their size, disks that are full at every place where one can be.
"""

import _thread
import errno
import fcntl
import functools
import os
import resource
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from support.bits import fingerprint
from support.models import tiny_model
from support.no_threads import die_at_birth, refuse_thread
from support.paging import assert_bitwise_equal, page_out
from support.training import digest_run
from torch import nn

import torch_offload
from torch_offload.runtime import safetensors_writer
from torch_offload.system import direct_file
from torch_offload.system.atomic_files import appearing, readable_path
from torch_offload.system.direct_file import SECTOR_BYTES, DirectFile


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_within_budget() -> None:
    report = torch_offload.report()
    assert report.evictions > 0
    assert report.host_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("shard", ["50GB", "300KB"])
def test_fused_experts_are_saved_one_by_one(config, tmp_path, shard):
    """The copies that transformers makes of them are paged as they are made."""
    tiny_model("mixtral", tied=False).save_pretrained(tmp_path / "plain", max_shard_size=shard)
    model = tiny_model("mixtral", tied=False)
    torch_offload.wrap(model, config=config, ram="1MiB")
    page_out(model)
    model.save_pretrained(tmp_path / "paged", max_shard_size=shard)
    assert_within_budget()
    experts_bytes = sum(weight.nbytes for name, weight in model.named_parameters() if "experts" in name)
    assert torch_offload.report().written_bytes["other"] >= experts_bytes // 2
    assert files(tmp_path / "paged") == files(tmp_path / "plain")


def test_names_metadata_and_types_are_spelled_as_the_library_does(config, tmp_path):
    """Quotes, other alphabets, empty and scalar tensors, every width."""
    tensors = {
        'with "quotes" and \\': torch.zeros(3, 0),
        "größe ✓": torch.tensor(1.5),
        "halves": torch.arange(7, dtype=torch.float16),
        "flags": torch.tensor([True, False, True]),
        "wide": torch.arange(5, dtype=torch.float64),
        "counts": torch.arange(3, dtype=torch.int8),
        "complete": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    }
    metadata = {"format": 'a "format"\n'}
    module = torch_offload.wrap(nn.Linear(256, 256), config=config, ram="1MiB")
    expected = tensors | {"paged": module.weight.detach().clone()}
    safetensors.torch.save_file(expected, tmp_path / "plain", metadata=metadata)
    safetensors.torch.save_file(tensors | {"paged": module.weight.detach()}, tmp_path / "paged", metadata=metadata)
    assert (tmp_path / "paged").read_bytes() == (tmp_path / "plain").read_bytes()


class FullDisk:
    """Fails the n-th call of a function, as a full disk does."""

    def __init__(self, monkeypatch, owner, name: str, fails_at: int) -> None:
        self.calls = 0
        self.fails_at = fails_at
        self.real = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args, **options):
        self.calls += 1
        if self.calls >= self.fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.real(*args, **options)


CALLS = [(direct_file, "preallocate", 1), (os, "pwrite", 1), (os, "pwrite", 5), (os, "fsync", 1), (os, "replace", 1)]


@pytest.mark.parametrize(("owner", "name", "fails_at"), CALLS, ids=lambda value: getattr(value, "__name__", value))
def test_a_full_disk_leaves_the_old_checkpoint(config, tmp_path, monkeypatch, owner, name, fails_at):
    """Before the first byte, in the middle, and when all seemed written; then there is room and it is replaced."""
    model = tiny_model("llama", tied=False)
    torch_offload.wrap(model, config=config, ram="1MiB")
    model.save_pretrained(tmp_path)
    before = files(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, owner, name, fails_at)
        with pytest.raises(OSError, match="No space left"):
            model.save_pretrained(tmp_path)
        assert disk.calls >= fails_at
    assert files(tmp_path) == before
    model.save_pretrained(tmp_path)
    after = files(tmp_path)
    assert after.keys() == before.keys()
    assert after["model.safetensors"] != before["model.safetensors"]
    content = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert_bitwise_equal(content["lm_head.weight"], model.lm_head.weight.detach())


def test_a_limit_on_the_size_of_files_is_noticed_before_the_first_byte(config, tmp_path):
    """As the system enforces it, nothing injected."""
    model = tiny_model("llama", tied=False)
    torch_offload.wrap(model, config=config, ram="1MiB")
    page_out(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("model*")) == []


def test_optimizer_states_are_written_and_read_within_the_budget(config, tmp_path):
    """torch.save of both dictionaries, and both loaded into a fresh pair that trains on, in memory or paged."""

    def make(*, is_paged: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch_offload.loading(config=config, ram="3MiB") if is_paged else nullcontext():
            model = tiny_model("gpt2", tied=True)
        if is_paged:
            torch_offload.wrap(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.arange(8)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    outcomes = []
    for run in ("plain", "paged"):
        model, optimizer = make(is_paged=run == "paged")
        step(model, optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / run)
        del model, optimizer
        model, optimizer = make(is_paged=run == "paged")
        content = torch.load(tmp_path / run)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        del content
        step(model, optimizer)
        outcomes.append(digest_run(model, optimizer))
    assert_within_budget()
    assert_bitwise_equal(*(fingerprint(torch.load(tmp_path / run)) for run in ("paged", "plain")))
    assert_within_budget()
    assert outcomes[1] == outcomes[0]


def refuse_direct(real, file: int, part: memoryview, offset: int) -> int:
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(file, part, offset)


def test_a_disk_that_cannot_preallocate_is_asked_for_its_room(scratch, monkeypatch):
    """More is wanted than is free: the error says so before the first byte."""
    monkeypatch.setattr(direct_file, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    with pytest.raises(OSError, match=r"bytes are needed, .* are free"), appearing(scratch / "file") as opened:
        direct_file.preallocate(opened, 1 << 60)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("size_bytes", [0, 1, SECTOR_BYTES, (64 << 10) - 1, 64 << 10, (1 << 20) + 7])
@pytest.mark.parametrize("disk", ["usual", "short writes", "no direct writes", "no preallocation"])
def test_a_direct_file_holds_what_was_appended(scratch, monkeypatch, size_bytes, disk):
    """Pieces of odd sizes, blocks that are used again; writes that end early, and what a file system may not have."""
    real = os.pwrite
    if disk == "short writes":
        cut = 3 * SECTOR_BYTES + 5
        monkeypatch.setattr(direct_file.os, "pwrite", lambda file, part, at: min(real(file, part, at), cut))
    elif disk == "no direct writes":  # which is found out only at the first of them
        monkeypatch.setattr(direct_file.os, "pwrite", functools.partial(refuse_direct, real))
    elif disk == "no preallocation":
        monkeypatch.setattr(direct_file, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    content = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)
    path = scratch / "file"
    with appearing(path) as opened, DirectFile(opened, size_bytes=size_bytes, budget_bytes=1 << 20) as file:
        done_bytes = 0
        while done_bytes < size_bytes:
            part_bytes = min(777 + done_bytes, size_bytes - done_bytes)
            file.append(content.data_ptr() + done_bytes, part_bytes)
            done_bytes += part_bytes
        file.finish()
    assert path.read_bytes() == content.numpy().tobytes()


@pytest.mark.parametrize("start", [refuse_thread, die_at_birth], ids=["refused", "dead at birth"])
def test_a_model_is_saved_where_there_is_no_room_for_threads(config, tmp_path, monkeypatch, start):
    """None can be started, or each ends before it has begun: Python's own threads are then waited for for ever."""
    module = torch_offload.wrap(nn.Linear(256, 256), config=config, ram="1MiB")
    safetensors.torch.save_file(module.state_dict(), tmp_path / "usual")
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", start)
        patch.setattr(threading, "_start_new_thread", start)
        safetensors.torch.save_file(module.state_dict(), tmp_path / "alone")
    assert (tmp_path / "alone").read_bytes() == (tmp_path / "usual").read_bytes()


def test_a_file_that_cannot_be_read_back_is_an_error_of_the_system(config, tmp_path, monkeypatch):
    """Method: a name that is not there; and torch must not be what maps the file, which keeps it open if that fails."""
    module = torch_offload.wrap(nn.Linear(256, 256), config=config, ram="1MiB")
    (tmp_path / "model").write_bytes(b"older")

    def refuse(*args, **options):
        raise RuntimeError("unable to mmap")

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "from_file", refuse)
        patch.setattr(safetensors_writer, "readable_path", lambda descriptor: "/proc/self/fd/no-number")
        with pytest.raises(FileNotFoundError):
            safetensors.torch.save_file(module.state_dict(), tmp_path / "model")
        patch.setattr(safetensors_writer, "readable_path", readable_path)
        safetensors.torch.save_file(module.state_dict(), tmp_path / "other")
    (tmp_path / "other").unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert (tmp_path / "model").read_bytes() == b"older"
