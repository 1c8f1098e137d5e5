"""Small trainings of modules that are no transformers, plain or paged, each in a process of its own.

A plain one never imports the package, so nothing that the package does to its process can be on both sides.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from support.cases import differing
from support.huge_pages import huge_page_bytes
from support.isolation import in_child
from support.training import Outcome, digest_run, random_states, seed_all
from support.vector_math import settle_vector_math

WIDTH = 128


@dataclass(frozen=True)
class Workload:
    """What is trained: `loss(module, step)` is that of one batch."""

    module: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    optimizers: Callable[[nn.Module], list[Optimizer]]
    steps: int = 5


@dataclass
class PagedOutcome(Outcome):
    """With what the engine counted, and the most memory in huge pages after a step."""

    report: Any = None
    huge_page_bytes: int = field(default=0, compare=False)


def adamw(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)]


def adamw_beside_sparse(module: nn.Module) -> list[Optimizer]:
    dense = [weight for name, weight in module.named_parameters() if not name.startswith("table")]
    return [torch.optim.SparseAdam(list(module.table.parameters()), lr=1e-2), *adamw(nn.ParameterList(dense))]


def dropping() -> nn.Sequential:
    """Six layers with normalization and dropout."""
    layers = ((nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)) for _ in range(6))
    return nn.Sequential(*(part for layer in layers for part in layer))


def drawn_loss(module: nn.Module, step: int) -> Tensor:
    """Of a batch from the generator that dropout draws from as well."""
    return module(torch.randn(16, WIDTH)).square().mean()


class Tabled(nn.Module):
    """A table of vectors below layers."""

    def __init__(self, rows: int, width: int, layers: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, ids: Tensor, skipped: int | None = None) -> Tensor:
        value = self.table(ids)
        for index, layer in enumerate(self.layers):
            if index != skipped:
                value = value + layer(value).tanh()
        return value


def looked_up_loss(module: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, module.table.num_embeddings, (4, 16), generator=generator)
    return module(ids).square().mean()


def changing_loss(module: nn.Module, step: int) -> Tensor:
    """Of one to eight rows of one to 64 tokens, without one of the layers; before every third, an evaluation."""
    generator = torch.Generator().manual_seed(step)
    rows, tokens, skipped = (int(torch.randint(1, limit, (), generator=generator)) for limit in (9, 65, 5))
    ids = torch.randint(0, module.table.num_embeddings, (rows, tokens), generator=generator)
    if step % 3 == 2:
        with torch.no_grad():
            module.eval()(ids.flip(0, 1)[:, :1])
        module.train()
    return module(ids, skipped).square().mean()


def convolutions() -> nn.Sequential:
    channels = (3, 64, 128, 128)
    layers = [
        part
        for one, other in itertools.pairwise(channels)
        for part in (nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 512))


def image_loss(module: nn.Module, step: int) -> Tensor:
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(step))
    return module(images).square().mean()


def sequence_loss(module: nn.Module, step: int) -> Tensor:
    """Of sequences whose length changes from step to step."""
    generator = torch.Generator().manual_seed(step)
    output, _ = module(torch.randn(3 + step, 4, WIDTH, generator=generator))
    return output.square().mean()


WORKLOADS = {
    "dropout": Workload(dropping, drawn_loss, adamw),
    "convolutions": Workload(convolutions, image_loss, adamw),
    "LSTM": Workload(lambda: nn.LSTM(WIDTH, WIDTH, num_layers=3, dropout=0.2), sequence_loss, adamw),
    "sparse table": Workload(lambda: Tabled(1000, WIDTH, 4, sparse=True), looked_up_loss, adamw_beside_sparse),
    "changing shapes": Workload(lambda: Tabled(400, WIDTH, 6), changing_loss, adamw, steps=12),
    "large": Workload(lambda: Tabled(5000, 2048, 3), looked_up_loss, adamw, steps=3),
}


def train_both(name: str, scratch: Path, *, budget_share: float, threads: int = 1, **settings: Any) -> Any:
    """Return the outcome in memory and the paged one, each of a process that trained nothing before."""
    plain = in_child(train, name, threads)
    return plain, in_child(train, name, threads, budget_share, {"ssd": str(scratch), **settings})


def train(name: str, threads: int, budget_share: float = 0, settings: dict[str, Any] | None = None) -> PagedOutcome:
    """Train once, seeded before the module is built and never again; paged where settings are given."""
    settle_vector_math()
    torch.set_num_threads(threads)
    workload = WORKLOADS[name]
    seed_all(5)
    module = workload.module()
    if settings is not None:
        import torch_offload

        state_bytes = 4 * sum(weight.nbytes for weight in module.parameters())
        torch_offload.wrap(module, config=torch_offload.Config(ram=int(budget_share * state_bytes), **settings))
    outcome = PagedOutcome()
    optimizers = workload.optimizers(module)
    for step in range(workload.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = workload.loss(module, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        outcome.losses.append(loss.item().hex())
        outcome.huge_page_bytes = max(outcome.huge_page_bytes, huge_page_bytes())
    for optimizer in optimizers:
        outcome.digests |= digest_run(module, optimizer)
    outcome.digests |= random_states()
    if settings is None:
        assert "torch_offload" not in sys.modules
    else:
        outcome.report = torch_offload.report()
    return outcome


def assert_same_but_paged(plain: PagedOutcome, paged: PagedOutcome) -> None:
    """All losses and bits are equal, and all three kinds of pages left and came back within the budget."""
    plain.assert_trained(len(plain.losses))
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    report = paged.report
    kinds = ("parameter", "gradient", "state")
    assert all(report.written_bytes[kind] > 0 for kind in kinds), report.written_bytes
    assert all(report.read_bytes[kind] > 0 for kind in kinds), report.read_bytes
    assert report.host_peak_bytes <= report.budget_bytes
