"""A training step on a disk that fails from a transfer on, for each transfer of the step.

    python -m support.failing_steps OPTIMIZER DIRECTORY [EVERY [FIRST]]

Needs failing_disk.c loaded before the C library. Prints one JSON object of what the steps ended in:

    before    an error, and every tensor as before the step
    after     every tensor as after it, with an error or without one
    refused   an error; some are as before and others as after, and saving them is refused

Whatever it was, training then goes on to the bits of the plain run. Anything else is an exception.
"""

import ctypes
import errno
import functools
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import torch_offload
from support.bits import fingerprint
from torch_offload import Config, OffloadError, TierIOError
from torch_offload.runtime import session
from torch_offload.runtime.process import PROCESS

STEPS_BEFORE = 2
WIDTH = 128
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "single": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2, foreach=False),
}


class Run:
    """One module and its optimizer; batches by the number of the step."""

    def __init__(self, make: Callable[[Any], Optimizer], config: Config | None, *, width: int = WIDTH) -> None:
        self.width = width
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
        self.module = layers if config is None else torch_offload.wrap(layers, config=config)
        self.optimizer = make(self.module.parameters())
        self.step_began = False

    def step(self, number: int) -> None:
        """Train; raises what the engine raises."""
        self.step_began = False
        self.optimizer.zero_grad()
        inputs = torch.randn(8, self.width, generator=torch.Generator().manual_seed(number))
        self.module(inputs).square().mean().backward()
        self.step_began = True
        self.optimizer.step()

    def state(self) -> Any:
        """Everything that training goes on with."""
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Any) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])


def plain_states(make: Callable[[Any], Optimizer]) -> tuple[Any, list[Any]]:
    """Return the state before the step that will fail, and fingerprints from there on."""
    run = Run(make, None)
    for number in range(STEPS_BEFORE):
        run.step(number)
    buffer = io.BytesIO()
    torch.save(run.state(), buffer)
    fingerprints = [fingerprint(run.state())]
    for number in range(STEPS_BEFORE, STEPS_BEFORE + 2):
        run.step(number)
        fingerprints.append(fingerprint(run.state()))
    return buffer.getvalue(), fingerprints


def is_saving_refused(run: Run) -> bool:
    try:
        torch.save(run.state(), io.BytesIO())
    except OffloadError as error:
        if "raised before its end" not in str(error):
            raise
        return True
    return False


def told_of_the_rest() -> None:
    """Writes may have failed after the error that was raised: that is said once, and nothing is lost by it."""
    try:
        torch_offload.flush()
    except TierIOError as error:
        if "nothing is lost" not in str(error):
            raise


def judge(run: Run, disk: ctypes.CDLL, first: int, before: bytes, expected: list[Any]) -> tuple[str, int]:
    """Return what a step ended in, and the number of transfers that it made."""
    disk.failing_disk_arm(first, errno.EIO)
    error: OffloadError | None = None
    try:
        run.step(STEPS_BEFORE)
        torch_offload.flush()
    except OffloadError as raised:
        error = raised
    transfers = disk.failing_disk_disarm()
    told_of_the_rest()
    if transfers < first:
        if error is not None:
            raise AssertionError("an error without a failed transfer") from error
        return "clean", transfers
    if is_saving_refused(run):
        if error is None or not run.step_began:
            raise AssertionError("saving is refused although no step was left half-way") from error
        run.load(torch.load(io.BytesIO(before), weights_only=False))
        outcome = "refused"
    else:
        found = fingerprint(run.state())
        if found not in expected[:2]:
            raise AssertionError(f"neither before nor after the step, and saved; transfer {first}") from error
        outcome = "before" if found == expected[0] else "after"
        if outcome == "before" and error is None:
            raise AssertionError(f"nothing was done and nothing was said; transfer {first}")
    if outcome != "after":
        run.step(STEPS_BEFORE)
    run.step(STEPS_BEFORE + 1)
    if fingerprint(run.state()) != expected[2]:
        raise AssertionError(f"training went on to other bits; transfer {first}, {outcome}") from error
    return outcome, transfers


def main() -> None:
    name, directory = sys.argv[1:3]
    every, first = (*map(int, sys.argv[3:]), 1, 1)[:2]
    disk = ctypes.CDLL(None)
    disk.failing_disk_disarm.restype = ctypes.c_long
    disk.failing_disk_arm.argtypes = (ctypes.c_long, ctypes.c_int)
    session._C.Engine = functools.partial(session._C.Engine, retry_delays_ms=[0])  # type: ignore[misc]
    before, expected = plain_states(OPTIMIZERS[name])
    config = Config(ram="512KiB", ssd=Path(directory), min_paged_bytes=0, page_elements=4096, io_engine="threads")
    outcomes: Counter[str] = Counter()
    while not outcomes["clean"]:
        run = Run(OPTIMIZERS[name], config)
        for number in range(STEPS_BEFORE):
            run.step(number)
        torch_offload.flush()
        torch_offload.evict(run.module)
        outcome, transfers = judge(run, disk, first, before, expected)
        outcomes[outcome] += 1
        del run
        PROCESS.close_session()
        first += every
    sys.stdout.write(json.dumps({"optimizer": name, "transfers": transfers, **outcomes}) + "\n")


if __name__ == "__main__":
    main()
