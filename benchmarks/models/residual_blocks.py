"""Layers of a pipeline without anything around them."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(torch.relu(self.up(value)))


class Blocks(nn.Module):
    """Layers one behind the other, and their loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(value), target)
