"""Nothing stays behind: kill -9 at any moment of training leaves no file in the scratch directory.

Method: training processes are killed after seeded random times, from before `wrap` until long after; the scratch file
was open in most of them, which their table of open files shows.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from support.isolation import start_child
from support.models import VOCABULARY, state_bytes, tiny_model

pytestmark = [pytest.mark.alone, pytest.mark.any_torch]

KILLS = 16
LONGEST_SECONDS = 3.0
MIN_WITH_OPEN_FILE = KILLS // 2


def train_without_end(scratch: str) -> None:
    """Train a paged model until somebody ends it."""
    import torch_offload

    torch.set_num_threads(1)
    model = tiny_model("llama", tied=True)
    config = torch_offload.Config(min_paged_bytes=0, page_elements=4096)
    torch_offload.wrap(model, ram=int(0.3 * state_bytes(model, moments=2)), ssd=scratch, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(16).reshape(2, 8) % VOCABULARY
    while True:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def open_files_under(folder: Path, pid: int) -> list[str]:
    """Files in `folder` that the process has open, deleted ones included."""
    targets = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    return [target for target in targets if target.startswith(f"{folder}/")]


def test_kill_at_a_random_moment_leaves_no_file(scratch):
    """After every kill the directory is empty."""
    moments = random.Random(20)
    with_open_file = 0
    for _ in range(KILLS):
        process = start_child(train_without_end, str(scratch))
        process.join(moments.uniform(0, LONGEST_SECONDS))
        assert process.is_alive(), "training ended by itself"
        with_open_file += bool(open_files_under(scratch, process.pid))
        process.kill()
        process.join()
        assert list(scratch.iterdir()) == []
    assert with_open_file >= MIN_WITH_OPEN_FILE
