"""A rank of a group over gloo: trains a Llama sharded by `fully_shard`, or with DDP, in memory and paged.

Reads one command per line from stdin and answers each with a JSON line. With --train no it knows "compare", which takes
the next of the cases that all ranks have in the same order; else "step", which trains on, and "replay", which does so
for some steps and says what bytes the best eviction had moved.
"""

import argparse
import itertools
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.belady_check import least_traffic, peak_of_replay
from harness.ranks import add_rank_options, digests_of, join_group, paging_figures
from harness.worker_process import serve
from models.bare_llama import BareLlama, Shape
from models.linear_stack import LinearStack, StackShape
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torch_offload
from torch_offload import Config
from torch_offload.runtime.process import PROCESS

COMPARED_STEPS = 2
REPLAYED_STEPS = 4
KINDS_OF_STATE = 4  # weights, gradients, two moments
SHARE = 0.4  # of a rank's state that FSDP2 gets
SHARE_BESIDE_GRADIENTS = 0.15  # that DDP gets, which keeps all gradients in its buckets
OWN_OPTIMIZER = "torch_offload"
Model = BareLlama | LinearStack


@dataclass(frozen=True)
class Case:
    """A way to train."""

    sharding: str  # "ddp", "fsdp", or "fsdp bf16": computed and gathered in bfloat16, reduced in float32
    optimizer: str = "fused"
    clips: bool = True
    micro_steps: int = 1
    activations: str = "page"

    @property
    def is_sharded(self) -> bool:
        return self.sharding != "ddp"


def all_cases() -> list[Case]:
    """Return those of the identity table."""
    ways = itertools.product(
        ("ddp", "fsdp", "fsdp bf16"),
        ("fused", "foreach", "default", "sgd", OWN_OPTIMIZER),
        (True, False),
        (1, 2),
        ("page", "keep"),
    )
    return [Case(*way) for way in ways]


class Rank:
    """One process of the group.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        join_group(options)
        self.options = options
        self.shape = shape_of(options)
        self.scratch = tempfile.TemporaryDirectory(dir=options.ssd)
        self.pages_at = f"store://{options.store}" if options.store else self.scratch.name
        self.cases = iter(all_cases()[:: options.every])
        self.training: Training | None = None
        if options.train != "no":
            case = Case("fsdp", activations=options.activations)
            self.training = Training(self, case, is_paged=options.train == "paged")

    def describe(self) -> dict[str, Any]:
        return {"cases": len(all_cases()[:: self.options.every]), "parameters": self.shape.parameters}

    def compare(self) -> dict[str, Any]:
        """Train the next case in memory and paged."""
        case = next(self.cases)
        plain = Training(self, case, is_paged=False).digests()
        training = Training(self, case, is_paged=True)
        paged = training.digests()
        figures = training.figures()
        training.unwrap()
        return {"case": asdict(case), "is_equal": plain == paged, "digests": len(plain), **figures}

    def step(self) -> dict[str, Any]:
        """Train one step; bytes are of the scratch file, both ways."""
        if self.training is None:
            raise SystemExit("this rank only compares")
        before = self.training.moved_bytes()
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.training.step()
        dist.barrier()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        moved = {name: total - before[name] for name, total in self.training.moved_bytes().items()}
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            **moved,
            **(self.training.figures() if self.training.is_paged else {}),
        }

    def replay(self) -> dict[str, float]:
        """Train some steps with every use of a page listed; count bytes of the last but one, ours and the least."""
        if self.training is None or PROCESS.session is None:
            raise SystemExit("this rank pages nothing")
        engine = PROCESS.session.engine
        engine.start_use_log()
        steps = [self.step() for _ in range(REPLAYED_STEPS)]
        log = engine.take_use_log()
        least = {
            name: float(sum(least_traffic(log, self.training.budget_bytes, beside_peaks=beside_peaks)))
            for name, beside_peaks in (("least_bytes", False), ("least_bytes_beside_peaks", True))
        }
        least["replayed_peak_bytes"] = float(peak_of_replay(log, self.training.budget_bytes))
        return {"moved_bytes": sum(steps[-2][name] for name in ("read_bytes", "written_bytes")), **least}


class Training:
    """A model on this rank, with its optimizer and tokens."""

    def __init__(self, rank: Rank, case: Case, *, is_paged: bool) -> None:
        torch.manual_seed(0)
        self.case = case
        self.is_paged = is_paged
        self.ranks = rank.options.ranks
        self.page_elements = rank.options.page_elements
        self.rows, self.tokens = rank.options.rows, rank.options.tokens
        self.module = new_model(rank.shape, rank.options.device)
        self.budget_bytes = rank.options.budget_bytes or budget_bytes(rank.shape, case, self.ranks)
        if case.is_sharded:
            shard(self.module, self.ranks, is_mixed=case.sharding == "fsdp bf16")
        if is_paged:
            torch_offload.wrap(self.module, config=self.config(rank.pages_at))
        if rank.options.device == "meta":
            fill(self.module)
        self.model = self.module if case.is_sharded else nn.parallel.DistributedDataParallel(self.module)
        self.optimizer = new_optimizer(self.module, case)
        self.generator = torch.Generator().manual_seed(rank.options.rank)

    def config(self, folder: str) -> Config:
        return Config(
            ram=self.budget_bytes,
            ssd=folder,
            page_elements=self.page_elements,
            min_paged_bytes=1 << 14,
            activations=self.case.activations,
        )

    def step(self) -> list[Tensor]:
        """Return losses and norm."""
        seen = []
        for _ in range(self.case.micro_steps):
            ids = torch.randint(0, 512, (self.rows, self.tokens), generator=self.generator)
            loss = self.model(ids)
            loss.backward()
            seen.append(loss.detach())
        if self.case.clips:
            seen.append(local(nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)).detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen

    def digests(self) -> list[str]:
        """Train, and return what there is to compare: losses, norms, weights and states."""
        seen = [tensor for _ in range(COMPARED_STEPS) for tensor in self.step()]
        with torch.no_grad():
            for parameter in self.module.parameters():
                states = [value for value in self.optimizer.state[parameter].values() if isinstance(value, Tensor)]
                seen += [local(tensor) for tensor in (parameter, *states)]
            return digests_of(seen)

    def moved_bytes(self) -> dict[str, int]:
        if not self.is_paged:
            return {}
        report = torch_offload.report()
        moved = {"read": report.read_bytes, "written": report.written_bytes}
        by_kind = {
            f"{way}_bytes_of_{kind}": size_bytes for way, kinds in moved.items() for kind, size_bytes in kinds.items()
        }
        return {"read_bytes": report.ssd_read_bytes, "written_bytes": report.ssd_written_bytes, **by_kind}

    def figures(self) -> dict[str, Any]:
        """Return what shows that it paged."""
        return paging_figures(self.budget_bytes)

    def unwrap(self) -> None:
        torch_offload.unwrap(self.module)


def budget_bytes(shape: Shape | StackShape, case: Case, ranks: int) -> int:
    """Return what a rank gets: 40 % of its state, or with DDP all gradients and 15 % of its state."""
    weights_bytes = 4 * shape.parameters
    if case.is_sharded:
        return int(SHARE * KINDS_OF_STATE * weights_bytes / ranks)
    return int((1 + SHARE_BESIDE_GRADIENTS * KINDS_OF_STATE) * weights_bytes)


def shape_of(options: argparse.Namespace) -> Shape | StackShape:
    if options.model == "stack":
        return StackShape(options.hidden, options.layers)
    return Shape(
        hidden=options.hidden,
        intermediate=2 * options.hidden,
        layers=options.layers,
        heads=4,
        vocabulary=512,
        has_fused_attention=False,
    )


def new_model(shape: Shape | StackShape, device: str) -> Model:
    with torch.device(device):
        return LinearStack(shape) if isinstance(shape, StackShape) else BareLlama(shape)


def fill(model: Model) -> None:
    """Give the shards of a model on the meta device memory and values."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=0.02)


def shard(model: Model, ranks: int, *, is_mixed: bool) -> None:
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (ranks,))}
    if is_mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def new_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case.optimizer == OWN_OPTIMIZER:
        return torch_offload.AdamW(model.parameters(), lr=1e-3)
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    kinds: dict[str, dict[str, bool]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "default": {"foreach": False},
    }
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **kinds[case.optimizer])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ssd", required=True)
    for name in ("hidden", "layers", "rows", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--model", choices=("llama", "stack"), default="llama")
    parser.add_argument("--store", help="of pages, as host:port; default: a scratch file on the SSD")
    parser.add_argument("--activations", choices=("page", "keep"), default="page", help="of --train")
    parser.add_argument("--every", type=int, default=1, help="take one case in so many")
    parser.add_argument("--train", choices=("no", "plain", "paged"), default="no")
    parser.add_argument(
        "--device", choices=("cpu", "meta"), default="cpu", help="meta: memory comes once it is sharded and wrapped"
    )
    parser.add_argument("--page-elements", type=int, default=1 << 14)
    parser.add_argument("--budget-bytes", type=int, default=0, help="default: what the case is given")
    return parser


if __name__ == "__main__":
    serve(lambda: Rank(make_parser().parse_args()))
