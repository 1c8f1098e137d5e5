"""A rank as a launcher starts it: trains with `fully_shard` from the newest checkpoint, saves after each step, ends.

Where it is told to, it fails on its way. Prints a JSON line for each step that it has made, and one when it begins to
fail.
"""

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from harness.ranks import paging_figures
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_offload
from torch_offload import Config

WIDTH, LAYERS, ROWS = 256, 16, 16
KINDS_OF_STATE = 4  # weights, gradients, two moments
SHARE = 0.4  # of a rank's state
FAILING_STEP = 1
PATIENCE = timedelta(minutes=5)
METADATA = ".metadata"  # what torch writes last into a checkpoint


class Model(nn.Sequential):
    """Layers that are gathered one by one."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))

    @property
    def weights_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())


class Failure:
    """What this rank ends by.

    Args:
        way: How; "no": not at all.
        phase: Where in the step.
        scratch: The directory of its pages.
    """

    def __init__(self, way: str, phase: str, scratch: str) -> None:
        self.way, self.phase, self.scratch = way, phase, scratch
        self.step = -1

    def pass_by(self, phase: str) -> None:
        """This phase of the step is reached: fail here if this is the place."""
        if self.way in WAYS and phase == self.phase and self.step == FAILING_STEP:
            say({"fails": self.way})
            WAYS[self.way](self)

    def hook(self, model: Model) -> None:
        """Say where each phase is."""
        middle = model[LAYERS // 2]
        middle.register_forward_pre_hook(lambda *_: self.pass_by("forward"))
        middle.register_full_backward_hook(lambda *_: self.pass_by("backward"))
        register_optimizer_step_pre_hook(lambda *_: self.pass_by("step"))

    def scratch_files(self) -> list[int]:
        """Return the descriptors of the nameless file that the pages of this rank go to."""
        folder = f"{os.path.realpath(self.scratch)}/#"
        links = {int(entry.name): entry for entry in Path("/proc/self/fd").iterdir()}
        return [number for number, link in links.items() if link.is_symlink() and os.readlink(link).startswith(folder)]

    def replace_files(self, path: str, flags: int) -> None:
        """Have transfers of pages reach another file, which does not do what a disk does."""
        other = os.open(path, flags)
        for number in self.scratch_files():
            os.dup2(other, number)
        os.close(other)

    def damage_files(self) -> None:
        """Turn one bit of each KiB."""
        for number in self.scratch_files():
            with open(f"/proc/self/fd/{number}", "r+b") as file:
                content = bytearray(file.read())
                content[::1024] = bytes(value ^ 0x10 for value in content[::1024])
                file.seek(0)
                file.write(content)


WAYS: dict[str, Callable[[Failure], None]] = {
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "disk does not read": lambda failure: failure.replace_files("/proc/self/mem", os.O_RDONLY),
    "pages damaged": lambda failure: failure.damage_files(),
}
"""What can be done in the middle of a step. Memory at the addresses of a scratch file's offsets is none."""

SMALL_BUDGET, SMALL_DISK = "budget too small", "disk full"
"""What the settings of the rank are to blame for. A disk is full, too, once pages take what `max_spill` allows."""
MAX_SPILL = 1 << 20


class Writer(FileSystemWriter):
    """Torch's own, told where a checkpoint is being written."""

    def __init__(self, folder: Path, failure: Failure) -> None:
        super().__init__(folder)
        self.failure = failure

    def write_data(self, *args: Any) -> Any:
        self.failure.pass_by("save")
        return super().write_data(*args)


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the last one that is complete."""
    complete = [path for path in folder.iterdir() if (path / METADATA).exists()]
    return max(complete, key=lambda path: int(path.name), default=None)


def train(options: argparse.Namespace, scratch: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    failure = Failure(options.way if rank == options.failing else "no", options.phase, scratch)
    torch.manual_seed(0)
    model = Model()
    budget_bytes = int(SHARE * KINDS_OF_STATE * model.weights_bytes / ranks)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if options.paged:
        config = Config(ram=budget_bytes, ssd=scratch, page_elements=1 << 13, min_paged_bytes=1 << 13)
        limits = {SMALL_BUDGET: {"ram": budget_bytes // LAYERS}, SMALL_DISK: {"max_spill": MAX_SPILL}}
        torch_offload.wrap(model, config=config.replace(**limits.get(failure.way, {})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    failure.hook(model)
    checkpoint = newest_checkpoint(options.checkpoints)
    first = 0
    if checkpoint is not None:
        first = int(checkpoint.name) + 1
        weights, states = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": states}
        distributed_checkpoint.load(content, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=content["optimizer"])
        del weights, states, content
    for step in range(first, first + options.steps):
        failure.step = step
        generator = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        weights, states = get_state_dict(model, optimizer)
        target = options.checkpoints / str(step)
        distributed_checkpoint.save(
            {"model": weights, "optimizer": states}, checkpoint_id=target, storage_writer=Writer(target, failure)
        )
        del weights, states
        say({"step": step, **(paging_figures(budget_bytes) if options.paged else {})})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--paged", action="store_true")
    parser.add_argument("--failing", type=int, default=-1, help="number of the rank that fails")
    parser.add_argument("--way", choices=("no", SMALL_BUDGET, SMALL_DISK, *WAYS), default="no")
    parser.add_argument("--phase", choices=("start", "forward", "backward", "step", "save"), default="start")
    parser.add_argument("--timeout", type=float, default=PATIENCE.total_seconds(), help="of a collective, seconds")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        train(options, scratch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
