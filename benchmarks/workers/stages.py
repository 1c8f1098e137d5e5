"""A rank of a pipeline over gloo: holds some of its stages and trains them by torch's own schedules.

Reads one command per line from stdin and answers each with a JSON line: "compare" trains by the next schedule, in
memory and paged. All ranks have the same schedules in the same order.
"""

import argparse
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from harness.ranks import add_rank_options, digests_of, join_group, paging_figures
from harness.worker_process import serve
from models.residual_blocks import Block, Blocks
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

import torch_offload
from torch_offload import Config
from torch_offload.runtime.process import PROCESS

ROWS = 4
PAGE_ELEMENTS = 1 << 16
KINDS_OF_STATE = 4  # weights, gradients, two moments
SHARE = 0.36  # of a rank's state that its pages get
KINDS = ("parameter", "gradient", "state")


@dataclass(frozen=True)
class Schedule:
    """One of torch's."""

    name: str
    kind: Any
    has_one_stage: bool  # on each rank; else each layer is a stage


SCHEDULES = (
    Schedule("1F1B", Schedule1F1B, has_one_stage=True),
    Schedule("GPipe", ScheduleGPipe, has_one_stage=True),
    Schedule("Interleaved1F1B", ScheduleInterleaved1F1B, has_one_stage=False),
    Schedule("LoopedBFS", ScheduleLoopedBFS, has_one_stage=False),
)


class Stages:
    """One process of the group.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        join_group(options)
        self.options = options
        self.scratch = tempfile.TemporaryDirectory(dir=options.ssd)
        self.schedules = iter(SCHEDULES)

    def describe(self) -> dict[str, Any]:
        return {"schedules": len(SCHEDULES)}

    def compare(self) -> dict[str, Any]:
        """Train by the next schedule in memory and paged; counts are those of a step, on this rank."""
        schedule = next(self.schedules)
        plain = Training(self, schedule, is_paged=False).train()
        training = Training(self, schedule, is_paged=True)
        paged = training.train()
        answer = {"schedule": schedule.name, "is_equal": plain == paged, **training.figures()}
        training.unwrap()
        return answer


class Training:
    """The stages of this rank, with their optimizer and what they are trained on."""

    def __init__(self, rank: Stages, schedule: Schedule, *, is_paged: bool) -> None:
        options = rank.options
        self.steps, self.warmup = options.steps, options.warmup
        self.rank, self.ranks = options.rank, options.ranks
        self.rank_options, self.name = options, schedule.name
        self.is_paged = is_paged
        self.stages = self.ranks if schedule.has_one_stage else options.layers
        modules = self.make_modules(options.layers, options.width)
        self.module = nn.ModuleList(modules.values())
        self.weights_bytes = sum(parameter.nbytes for parameter in self.module.parameters())
        self.budget_bytes = int(SHARE * KINDS_OF_STATE * self.weights_bytes)
        if is_paged:
            config = Config(ram=self.budget_bytes, ssd=rank.scratch.name, page_elements=PAGE_ELEMENTS)
            torch_offload.wrap(self.module, config=config)
        device = torch.device("cpu")
        stages = [PipelineStage(module, index, self.stages, device) for index, module in modules.items()]
        held = stages[0] if schedule.has_one_stage else stages
        self.schedule = schedule.kind(held, options.micro_batches, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(3)
        shape = (options.micro_batches * ROWS, options.width)
        self.inputs = torch.randn(shape, generator=generator)
        self.targets = torch.randn(shape, generator=generator)
        self.counted: Counter[str] = Counter()

    def make_modules(self, layers: int, width: int) -> dict[int, nn.Sequential]:
        """Return this rank's stages by their number, with numbers that do not depend on how they are divided."""
        torch.manual_seed(0)
        blocks = [Block(width) for _ in range(layers)]
        of_stage = layers // self.stages
        return {
            stage: nn.Sequential(*blocks[stage * of_stage : (stage + 1) * of_stage])
            for stage in range(self.rank, self.stages, self.ranks)
        }

    def train(self) -> list[str]:
        """Return digests of losses, weights and states; count what the steps after the first ones do."""
        seen: list[Tensor] = []
        for step in range(self.warmup + self.steps):
            before = self.counters()
            seen += self.step()
            if step >= self.warmup:
                self.counted.update({name: total - before[name] for name, total in self.counters().items()})
        with torch.no_grad():
            for parameter in self.module.parameters():
                states = [value for value in self.optimizer.state[parameter].values() if isinstance(value, Tensor)]
                seen += [parameter, *states]
            return digests_of(seen)

    def step(self) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = (self.inputs,) if self.rank == 0 else ()
        is_last = (self.stages - 1) % self.ranks == self.rank
        self.schedule.step(*inputs, **({"target": self.targets, "losses": losses} if is_last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def counters(self) -> dict[str, int]:
        """Return the engine's, which only grow."""
        if not self.is_paged or PROCESS.session is None:
            return {}
        statistics = PROCESS.session.statistics()
        moved = {f"{way}_of_{kind}": statistics[way][kind] for way in ("read_bytes", "written_bytes") for kind in KINDS}
        return moved | {name: statistics[name] for name in ("applied_pages", "updates_in_rank_waits")}

    def figures(self) -> dict[str, Any]:
        """Return what shows that it paged."""
        return {
            "weights_bytes": self.weights_bytes,
            "stages": self.stages,
            "planned": self.planned(),
            "counted": {name: total / self.steps for name, total in self.counted.items()},
            **paging_figures(self.budget_bytes),
        }

    def planned(self) -> dict[str, int]:
        """Return what a plan says of the same counters on this rank."""
        options = self.rank_options
        with torch.device("meta"):
            model = Blocks(options.layers, options.width)
            given = {name: torch.empty(ROWS, options.width) for name in ("value", "target")}
        plan = torch_offload.plan(
            model,
            given,
            config=Config(ram=self.budget_bytes, page_elements=PAGE_ELEMENTS),
            micro_batches=options.micro_batches,
            schedule=self.name,
            ranks=self.ranks,
            stages=self.stages,
        )
        rank = plan.best.ranks[self.rank]
        ways = {"read_bytes": rank.ssd_read, "written_bytes": rank.ssd_written}
        return {f"{way}_of_{kind}": moved.get(kind, 0) for way, moved in ways.items() for kind in KINDS}

    def unwrap(self) -> None:
        torch_offload.unwrap(self.module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ssd", required=True)
    for name in ("layers", "width", "micro-batches", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    serve(lambda: Stages(parser.parse_args()))


if __name__ == "__main__":
    main()
