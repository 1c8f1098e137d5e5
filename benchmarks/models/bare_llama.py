"""A Llama in plain torch, for machines that have nothing else: the layers of the real one, random weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. The default is that of Llama 2 7B (arXiv 2307.09288)."""

    hidden: int = 4096
    intermediate: int = 11008
    layers: int = 32
    heads: int = 32
    vocabulary: int = 32000
    has_fused_attention: bool = True

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden + self.hidden


class Attention(nn.Module):
    """Causal, with rotated queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.projections = nn.ModuleList(nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        split = (rows, tokens, self.shape.heads, -1)
        query, key, value = (self.projections[i](x).view(split).transpose(1, 2) for i in range(3))
        query, key = rotated(query, angles), rotated(key, angles)
        if self.shape.has_fused_attention:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
            mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self.projections[3](mixed.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """Attention and a gated network, each behind a norm and beside what it adds to."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, eps=1e-5) for _ in range(2))
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), angles)
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class BareLlama(nn.Module):
    """Returns the loss of predicting each next token. Layers run again in the backward pass."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        angles = rotation(ids.shape[1], self.shape.hidden // self.shape.heads, ids.device)
        for layer in self.layers:
            x = checkpoint(layer, x, angles, use_reentrant=False)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def rotation(tokens: int, width: int, device: torch.device) -> Tensor:
    """Return the angle of each token (rows) for each pair of elements (columns), fp32."""
    rates = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.outer(torch.arange(tokens, dtype=torch.float32), rates).to(device)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs of elements that lie half the width apart (Su et al., arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
