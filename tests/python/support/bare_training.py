"""Training over bare parameters, plain or paged, for tests that look at the engine itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from support.bits import same_bits
from torch_offload import _C

PAGE_ELEMENTS = 4096
STEPS = 4
SHAPES = ((129, 161), (64, 256), (3 * PAGE_ELEMENTS,), (40, 8, 41), (7,))  # the last one is too small to be paged

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Program = Callable[["Run"], None]


def make_engine(directory: Path, budget_bytes: int = 512 << 10, *, min_paged_bytes: int = 4096) -> _C.Engine:
    return _C.Engine(
        budget_bytes=budget_bytes,
        directories=[str(directory)],
        io_engine="auto",
        queue_depth=8,
        page_elements=PAGE_ELEMENTS,
        min_paged_bytes=min_paged_bytes,
    )


@dataclass
class Run:
    """One small training run over bare parameters; with an engine, the same run paged."""

    engine: _C.Engine | None = None
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    parameters: list[nn.Parameter] = field(init=False)
    optimizer: Optimizer = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(self.random(shape)) for shape in self.shapes]
        for index, parameter in enumerate(self.parameters):
            self.manage(parameter, "parameter", f"weight {index}")

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def manage(self, tensor: Tensor, kind: str, label: str) -> None:
        if self.engine is not None:
            self.engine.manage(tensor, kind=kind, label=label)

    def backward(self, skip: int | None = None) -> None:
        """Gradients that depend on the weights, as those of a loss do."""
        for index, parameter in enumerate(self.parameters):
            gradient = 0.1 * parameter.detach() + self.random(tuple(parameter.shape))
            if index == skip or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
                self.manage(gradient, "gradient", f"gradient {index}")
            else:
                parameter.grad.add_(gradient)

    def evict(self) -> None:
        """Nothing is in memory when the optimizer comes."""
        if self.engine is None:
            return
        for tensor in (*self.parameters, *self.gradients(), *self.states()):
            if _C.is_managed(tensor):
                self.engine.evict(tensor)

    def step(self) -> None:
        self.unended_step()
        if self.engine is not None:
            self.engine.end_optimizer_step()

    def unended_step(self) -> None:
        """A step without the boundary from which on the engine works ahead by itself."""
        if self.engine is not None:
            self.engine.begin_optimizer_step()
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def states(self) -> list[Tensor]:
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor)]

    def everything(self) -> list[Tensor]:
        tensors = (*self.parameters, *self.gradients(), *self.states())
        return [tensor.detach().clone() for tensor in tensors]

    def count(self, name: str) -> int:
        assert self.engine is not None
        value = self.engine.statistics()[name]
        assert isinstance(value, int)
        return value


def assert_equal_bits(paged: list[Tensor], plain: list[Tensor]) -> None:
    assert len(paged) == len(plain)
    for index, (one, other) in enumerate(zip(paged, plain, strict=True)):
        assert same_bits(one, other), index


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def training(make: MakeOptimizer, **options: object) -> Program:
    """Some steps, everything evicted before each update; `options` are those of `zero_grad`."""

    def program(run: Run) -> None:
        run.optimizer = make(run.parameters)
        for _ in range(STEPS):
            run.backward()
            run.evict()
            run.step()
            run.optimizer.zero_grad(**options)

    return program
