"""A machine is measured once; what is kept is used as long as it holds, and is never in the way.

Method: the real measurement with its rounds cut short, and counts of how often it is made. What paging costs comes from
a stand-in; test_paging_cost.py has the real one.
"""

import json

import pytest
import torch
from support.huge_pages import huge_page_bytes, skip_where_there_are_none

import torch_offload
from torch_offload import _C, Probe
from torch_offload.diagnostics import compute_rates, paging_cost
from torch_offload.diagnostics import ssd_benchmark as benches
from torch_offload.diagnostics.probe import probe as measure

RATES = ("ssd_read", "ssd_write", "ssd_mixed", "copy_rate")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The number of measurements so far, each of which takes a moment only."""
    import sys

    module = sys.modules["torch_offload.diagnostics.probe"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SSD_FILE_BYTES", 8 << 20)
    monkeypatch.setattr(module, "SSD_SECONDS", 0.01)
    for name, little in {"COPY_BYTES": 1 << 20, "GEMM_SIZE": 64, "ROUNDS": 1}.items():
        monkeypatch.setattr(compute_rates, name, little)
    monkeypatch.setattr(paging_cost, "measure", lambda directory: paging_cost.PagingCost(read=3e-10, written=1e-10))
    calls = []
    original = benches.measure

    def counted(request, **options):
        calls.append(request)
        return original(request, **options)

    monkeypatch.setattr(benches, "measure", counted)
    return calls


def test_every_rate_is_measured(measured, scratch):
    found = torch_offload.probe(scratch)
    assert all(getattr(found, name) > 0 for name in RATES)
    assert all(rate > 0 for rate in [*found.gemm.values(), *found.update.values()])
    assert (found.read_cost, found.write_cost) == (3e-10, 1e-10)
    assert set(found.gemm) == {"float32", "bfloat16"}
    assert set(found.update) == {"adamw_torch_fused", "torch_offload.AdamW"}
    assert list(scratch.iterdir()) in ([], [scratch / "cache"])


def test_the_disk_is_measured_with_huge_pages(scratch):
    """As the frames of the pager have them: with pages of 4 KiB a disk may give half. Method: the system's count."""
    skip_where_there_are_none()
    before = huge_page_bytes()
    probe = _C.SsdProbe(directory=str(scratch), io_engine="auto", file_bytes=64 << 20, block_bytes=2 << 20, max_depth=8)
    assert huge_page_bytes() - before >= 8 << 20
    assert probe.measure(pattern="read", depth=8, seconds=0.01)["read_bytes"] > 0


def test_what_was_measured_is_used_again(measured, scratch):
    first = measure(scratch)
    assert measure(scratch) == first
    assert len(measured) == 1
    measure(scratch, refresh=True)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"ssd_read": 1}', "\xe9", "other machine"])
def test_what_is_kept_and_cannot_be_used_is_measured_again(measured, scratch, tmp_path, damage):
    """An unfinished file, one of another version, one of another machine under the same name."""
    first = measure(scratch)
    [file] = (tmp_path / "cache" / "torch_offload").iterdir()
    if damage == "other machine":
        damage = first.model_copy(update={"key": {"processor": "another"}}).model_dump_json()
    file.write_text(damage, encoding="latin-1")
    assert measure(scratch).key == first.key
    assert len(measured) == 2
    assert json.loads(file.read_text())["key"] == first.key


def test_a_cache_that_cannot_be_written_is_said_and_not_needed(measured, scratch, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where a directory should be")
    assert measure(scratch).ssd_read > 0
    assert "measurements are not kept for the next time" in caplog.text


def test_progress_is_told(measured, scratch):
    told = []
    measure(scratch, show=lambda what, done, total: told.append((what, done, total)))
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert {total for _, _, total in told} == {len(told)}


def test_a_probe_does_not_change(measured, scratch):
    found = measure(scratch)
    with pytest.raises(ValueError, match="frozen"):
        found.ssd_read = 1.0
    assert Probe.model_validate(found.to_dict()) == found


def test_a_gpu_that_others_fill_is_left_out(measured, scratch, monkeypatch, caplog, tmp_path):
    """What is planned without it goes on; the next probe looks again."""

    def refuse(device):
        raise torch.OutOfMemoryError(f"{device} is full")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # Torch's optimizers ask for the GPU's stream from 2.15 on.
    monkeypatch.setattr(compute_rates, "update_rates", lambda: {"adamw_torch_fused": 1e9})
    monkeypatch.setattr(compute_rates, "gpu_rates", refuse)
    assert measure(scratch).gpu is None
    assert "the GPU has too little free memory to be measured, and nothing is kept: cuda:0 is full" in caplog.text
    assert not (tmp_path / "cache").exists()
