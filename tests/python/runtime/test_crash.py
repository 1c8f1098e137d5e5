"""Nothing stays behind: kill -9 at any moment of training leaves no file in the scratch directory.

Method: training processes are killed at moments of their own progress, not of the clock: before, in and after `wrap`,
and seeded random times after their scratch file was open, which their table of open files shows.
"""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.isolation import start_child
from support.models import VOCABULARY, state_bytes, tiny_model
from support.paging import wait_until

pytestmark = [pytest.mark.alone, pytest.mark.any_torch]

KILLS_AT_START = 4
KILLS_WHILE_TRAINING = 10
LONGEST_START_SECONDS = 2.0
LONGEST_TRAINING_SECONDS = 1.0


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
    targets = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            targets.append(os.readlink(entry.path))
    return [target for target in targets if target.startswith(f"{folder}/")]


@pytest.mark.parametrize("kills", [KILLS_AT_START, KILLS_WHILE_TRAINING], ids=["while it starts", "while it trains"])
def test_kill_at_a_random_moment_leaves_no_file(scratch, kills):
    """After every kill the directory is empty."""
    moments = random.Random(20)
    trains = kills == KILLS_WHILE_TRAINING
    for _ in range(kills):
        process = start_child(train_without_end, str(scratch))
        if trains:
            wait_until(lambda pid=process.pid: open_files_under(scratch, pid) != [], "the scratch file was open")
        time.sleep(moments.uniform(0, LONGEST_TRAINING_SECONDS if trains else LONGEST_START_SECONDS))
        assert process.is_alive(), "training ended by itself"
        process.kill()
        process.join()
        assert list(scratch.iterdir()) == []
