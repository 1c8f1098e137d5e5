"""Mixed-precision AdamW the obvious way: bf16 weights, an fp32 master beside each, one torch operator per operation."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def to_bf16(master: Tensor) -> Tensor:
    """Round to nearest, ties away from zero, as docs/reference/adamw.md defines the weight of a master."""
    top = torch.where(master.isnan(), 0x7FC0, (master.view(torch.int32).to(torch.int64) + 0x8000) >> 16)
    return top.to(torch.int16).view(torch.bfloat16)


@dataclass
class ReferenceAdamW:
    """The formula of docs/reference/adamw.md; each line is one fp32 operation, rounded by itself."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    masters: dict[int, Tensor] = field(default_factory=dict)
    moments: dict[int, list[Tensor]] = field(default_factory=dict)
    steps: int = 0

    @torch.no_grad()
    def step(self, weights: list[Tensor], gradients: list[Tensor]) -> None:
        self.steps += 1
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if index not in self.masters:
                self.masters[index] = weight.detach().float().clone()
                self.moments[index] = [torch.zeros_like(self.masters[index]) for _ in range(3)]
            master = self.update(index, gradient.float())
            weight.copy_(to_bf16(master) if weight.dtype is torch.bfloat16 else master)

    def update(self, index: int, gradient: Tensor) -> Tensor:
        gradient = -gradient if self.maximize else gradient
        master, (average, square, largest) = self.masters[index], self.moments[index]
        difference = gradient - average
        near = 1 - self.beta1 < 0.5
        start, part = (average, _f(1 - self.beta1)) if near else (gradient, _f(1 - self.beta1) - 1)
        average.copy_(start + part * difference)
        fresh = (_f(1 - self.beta2) * gradient) * gradient
        square.copy_(_f(self.beta2) * square + fresh)
        largest.copy_(torch.maximum(largest, square))
        # Through double: a square root in fp32 is not always the nearest number (MKL), one rounded from double is.
        root = (largest if self.amsgrad else square).double().sqrt().float()
        denominator = root / _f(math.sqrt(1 - self.beta2**self.steps)) + _f(self.eps)
        decayed = master * _f(1 - self.lr * self.weight_decay)
        step = _f(-self.lr / (1 - self.beta1**self.steps)) * average
        return master.copy_(decayed + step / denominator)


def _f(value: float) -> Tensor:
    """A double rounded to fp32."""
    return torch.tensor(value, dtype=torch.float32)
