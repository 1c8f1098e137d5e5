"""An access behind the dispatcher that ends on wrong bytes is raised in the main thread, or changes the exit status.

Method: a page is damaged while it is away and read through its address, as a kernel with bare addresses does; no
operation of torch comes after it.
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.bits import digest
from support.paging import wait_until
from support.unserved_faults import MOMENTS, PAGE, damage, raw_view
from torch import nn

import torch_offload
from torch_offload import Config, PageCorruptError

WIDTH = 128
ROOT = Path(__file__).resolve().parents[3]
SAYS_SO = "torch_offload: an access to paged memory outside of torch's operators got wrong bytes"


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def run_bytecodes() -> None:
    for _ in range(1000):
        pass


def test_it_is_raised_at_the_next_bytecode_and_once(config: Config, scratch: Path) -> None:
    """Neither more bytecodes nor a pin raise it again; the next access that fails is another one."""
    module = torch_offload.wrap(make_module(), config=config)
    array = raw_view(module[0].weight)
    damage(module, scratch)
    for _ in range(3):
        with pytest.raises(PageCorruptError, match=PAGE):
            array.sum()
        run_bytecodes()
        module[1].weight.sum()


def test_a_fault_of_another_thread_is_raised_in_the_main_thread(config: Config, scratch: Path) -> None:
    """The other one goes on."""
    module = torch_offload.wrap(make_module(), config=config)
    array = raw_view(module[0].weight)
    damage(module, scratch)
    sums: list[float] = []
    thread = threading.Thread(target=lambda: sums.append(array.sum()))

    def start_and_wait() -> None:
        thread.start()
        wait_until(lambda: False, "it was raised")

    with pytest.raises(PageCorruptError, match=PAGE):
        start_and_wait()
    while thread.is_alive():
        with suppress(PageCorruptError):  # its access still goes on
            thread.join()
            run_bytecodes()
    assert len(sums) == 1
    run_bytecodes()
    module[1].weight.sum()


def test_training_goes_on_exactly(config: Config, scratch: Path) -> None:
    """What raised is handled and the tensor replaced: the numbers are those of a run in memory."""
    outcomes = []
    for is_paged in (False, True):
        module = torch_offload.wrap(make_module(), config=config) if is_paged else make_module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        for step in range(4):
            optimizer.zero_grad()
            module(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            if is_paged and step == 1:
                array = raw_view(module[0].weight)
                kept = damage(module, scratch)
                with pytest.raises(PageCorruptError, match=PAGE):
                    array.sum()
                module[0].weight.data = kept
        outcomes.append([digest(tensor) for weight in module.parameters() for tensor in (weight, weight.grad)])
    assert outcomes[1] == outcomes[0]


STATUSES = {
    "nothing": 0,
    "caught": 0,
    "last statement": 1,
    "early exit function": 1,
    "late exit function": 1,
    "thread": 1,
    "pool": 1,
    "closed": 1,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_exit_status_tells(moment: str, scratch: Path) -> None:
    """It is 0 if all was well or handled; otherwise there is a message that names the page, or a traceback does."""
    paths = [str(ROOT), str(ROOT / "tests/python")]
    command = [sys.executable, "-m", "support.unserved_faults", moment, str(scratch)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ended.returncode == STATUSES[moment], ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith(SAYS_SO)]
    tracebacks = ended.stderr.count("Traceback")
    if moment == "nothing":
        assert ended.stderr == ""
    elif moment == "last statement":
        assert (len(lines), tracebacks) == (0, 1)
        assert PAGE in ended.stderr.splitlines()[-1]
    elif STATUSES[moment] == 0:
        assert (len(lines), tracebacks) == (0, 0)
    else:
        assert (len(lines), tracebacks) == (1, 0)
        assert PAGE in lines[0]
