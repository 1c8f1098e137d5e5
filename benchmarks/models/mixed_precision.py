"""bf16 weights with fp32 masters the way plain torch does it: what mixed-precision rows are compared with."""

from collections.abc import Iterable

import torch


class MasterAdamW:
    """Stock fused AdamW over fp32 copies of the weights, which are cast back after each step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float) -> None:
        self.weights = list(parameters)
        self.masters = [weight.detach().float() for weight in self.weights]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self.inner.step()
        self.inner.zero_grad()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None
