"""A rank of workers/rank.py that says of a step what a model of many ranks is fed with.

It knows three commands more: "profile", a step with the processor time of its passes and the times of its reads;
"link", which times collectives of as many bytes as a layer has; "shard", the parameters of this rank.
"""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness.worker_process import serve
from workers.rank import Rank, Training, make_parser

import torch_offload
from torch_offload.reporting.read_times import Bin

TIMED_COLLECTIVES = 21


class ScaleRank(Rank):
    """One process of the group, or the only one of a fake group."""

    def profile(self) -> dict[str, Any]:
        """Train one step."""
        before = read_times_of(self.training)
        passes = PassTimes(self.training)
        step = self.step()
        return step | passes.finish() | {"read_times": bins_since(before, read_times_of(self.training))}

    def link(self) -> dict[str, float]:
        """Have the ranks gather and reduce as many bytes as a layer has; seconds for each byte from another rank."""
        ranks = self.options.ranks
        part = torch.ones(self.shape.layer_parameters // ranks)
        whole = torch.empty(ranks * len(part))
        seconds: dict[str, list[float]] = {"gather": [], "reduce": []}
        for _ in range(TIMED_COLLECTIVES):
            for name in seconds:
                dist.barrier()
                begin = time.perf_counter()
                if name == "gather":
                    dist.all_gather_into_tensor(whole, part)
                else:
                    dist.reduce_scatter_tensor(part, whole)
                seconds[name].append(time.perf_counter() - begin)
        from_others = whole.nbytes - part.nbytes
        return {f"{name}_seconds_per_byte": median(each) / from_others for name, each in seconds.items()}

    def shard(self) -> dict[str, int]:
        """Count the parameters that this rank has, with what makes all shards of one equally large."""
        shapes = [] if self.training is None else [each.shape for each in self.training.module.parameters()]
        return {"shard_parameters": sum(-(-shape[0] // self.options.ranks) * shape[1:].numel() for shape in shapes)}


class PassTimes:
    """Processor seconds of this process in the forward and in the backward of one step."""

    def __init__(self, training: Training | None) -> None:
        self._ends: list[float] = []
        self._begin = time.process_time()
        self._hooks = []
        if training is not None:
            self._hooks = [
                training.module.register_forward_hook(self._end_forward),
                training.optimizer.register_step_pre_hook(self._end_backward),
            ]

    def _end_forward(self, *_: object) -> None:
        self._ends.append(time.process_time())

    def _end_backward(self, *_: object) -> None:
        self._ends.append(time.process_time())

    def finish(self) -> dict[str, float]:
        for hook in self._hooks:
            hook.remove()
        forward_end, backward_end = self._ends
        return {
            "forward_cpu_seconds": forward_end - self._begin,
            "backward_cpu_seconds": backward_end - forward_end,  # clipping, which waits for it, included
        }


def read_times_of(training: Training | None) -> tuple[Bin, ...]:
    return torch_offload.report().read_times.bins if training is not None and training.is_paged else ()


def bins_since(before: tuple[Bin, ...], after: tuple[Bin, ...]) -> list[Bin]:
    """Return the bins of the reads that were added."""
    counts = {(begin, end): count for begin, end, count in before}
    added = [(begin, end, count - counts.get((begin, end), 0)) for begin, end, count in after]
    return [each for each in added if each[2] > 0]


if __name__ == "__main__":
    serve(lambda: ScaleRank(make_parser().parse_args()))
