"""What paging costs the processor is measured on pages that really move, in a process of its own.

Method: the real measurement once, its turns with little networks, and children that fail.
"""

import sys
from pathlib import Path

import pytest

import torch_offload
from torch_offload.diagnostics import paging_cost, paging_turns
from torch_offload.errors import OffloadError

pytestmark = pytest.mark.any_torch


def test_a_turn_that_is_frozen_only_reads_and_one_that_trains_writes_too(scratch, monkeypatch):
    monkeypatch.setattr(paging_turns, "ROUNDS", 1)
    monkeypatch.setattr(paging_turns, "TURNS", 3)
    _, read_bytes, written_bytes = paging_turns._added(paging_turns._forward(3), 40 << 20, str(scratch))
    block_bytes = 4 * (2 * paging_turns.WIDTH * paging_turns.WIDER + paging_turns.WIDTH**2)
    assert 1.5 * block_bytes <= read_bytes <= 6 * block_bytes
    assert written_bytes == 0
    trained = paging_turns._training(2)
    _, read_bytes, written_bytes = paging_turns._added(trained, 80 << 20, str(scratch))
    assert min(read_bytes, written_bytes) >= block_bytes
    with pytest.raises(torch_offload.OffloadError, match="is not wrapped"):
        torch_offload.unwrap(trained[0])


@pytest.mark.alone
def test_it_is_measured_in_a_process_of_its_own(scratch):
    """And nothing is left behind. How much it is depends on what else runs here, so the numbers are not judged."""
    found = paging_cost.measure(scratch)
    assert 0 <= found.read < float("inf")
    assert 0 <= found.written < float("inf")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no room')", "failed with exit status 1: no room"),
        ("print('nothing')", "measuring what paging costs failed: 1 validation error"),
        ("import time; time.sleep(60)", "timed out"),  # it hangs, and is ended after two seconds
    ],
)
def test_a_child_that_fails_says_why(scratch, tmp_path, monkeypatch, program, message):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    Path(python).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(paging_cost, "TIMEOUT_SECONDS", 2)
    with pytest.raises(OffloadError, match=message):
        paging_cost.measure(scratch)
