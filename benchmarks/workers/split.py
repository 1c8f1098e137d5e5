"""Trains as workers/step.py does, or adapters as workers/adapters.py does, with the rows of a step in micro-batches.

Takes their options, and --accumulation and --ssd-rate. Without --rank all weights train. --batch is the rows of a
micro-batch.
"""

import argparse
from typing import TYPE_CHECKING, Any

import torch
from harness.machine import CpuSeconds
from harness.process_memory import forget_peak, peak_resident_bytes
from harness.worker_process import serve
from workers.adapters import AdaptersWorker, make_adapters_parser
from workers.step import Worker

if TYPE_CHECKING:
    from torch_offload import Config


class SplitStep:
    """A step of several micro-batches, whose losses are means over the rows of all of them."""

    options: argparse.Namespace
    model: Any
    optimizer: Any

    def config(self, options: argparse.Namespace) -> "Config":
        """Return the settings, with a disk that is slowed down."""
        config: Config = super().config(options)  # type: ignore[misc]
        return config.replace(emulation={"ssd_rate": options.ssd_rate}) if options.ssd_rate else config

    def step(self) -> dict[str, Any]:
        """Take a step; its bytes include what moved just before it."""
        forget_peak()
        before = CpuSeconds.now()
        total = 0.0
        for ids in self.rows():
            loss = self.model(input_ids=ids, labels=ids).loss / self.options.accumulation
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        measured: dict[str, Any] = CpuSeconds.now().since(before)
        traffic: dict[str, float] = self.traffic_since_last_call()  # type: ignore[attr-defined]
        return measured | traffic | {"peak_resident_bytes": float(peak_resident_bytes()), "loss": total}

    def rows(self) -> list[torch.Tensor]:
        """Return the micro-batches of a step: the same rows however they are split."""
        options = self.options
        torch.manual_seed(1)
        ids = torch.randint(0, options.vocabulary, (options.batch * options.accumulation, options.sequence))
        return list(ids.split(options.batch))


class SplitWorker(SplitStep, Worker):
    """All weights train."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        super().__init__(options)


class SplitAdaptersWorker(SplitStep, AdaptersWorker):
    """Adapters train."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        super().__init__(options)


def parse_options() -> argparse.Namespace:
    parser = make_adapters_parser()
    parser.set_defaults(rank=0)  # all weights train
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--ssd-rate", type=int, default=0, help="bytes per second that both ways share; 0: as it is")
    return parser.parse_args()


def make_worker(options: argparse.Namespace) -> SplitStep:
    return SplitAdaptersWorker(options) if options.rank else SplitWorker(options)


if __name__ == "__main__":
    serve(lambda: make_worker(parse_options()))
