"""Many equal layers of one matrix each: of all models the one that gathers the least at once for its weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StackShape:
    """Sizes of a stack; each layer's matrix is square."""

    hidden: int
    layers: int

    @property
    def layer_parameters(self) -> int:
        return self.hidden**2

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters


class LinearStack(nn.Module):
    """Returns the mean square of what the layers, each beside what it adds to, make of waves at the tokens' pitch."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(shape.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.sin(ids[..., None] * torch.arange(self.shape.hidden, dtype=torch.float32))
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()
