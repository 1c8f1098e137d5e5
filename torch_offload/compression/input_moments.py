"""Second moments of the inputs of a module's experts, gathered while the model runs."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torch_offload.moe.layouts import ExpertsModule
from torch_offload.moe.modules import DOWN, UP, Product

_TOKENS_OF_THE_REST = 1.0
"""An expert's own tokens count as they are; those of the whole layer as so many for each of its columns."""


class ExpertMoments(nn.Module):
    """Stands for coded experts while a model runs: multiplies by the weights as they are and keeps ``sum x x^T``.

    Each token counts the same: x is brought to a length of one. A few tokens of a model have activations hundreds of
    times larger than others' ("massive activations", Sun et al., arXiv 2402.17762), and would decide alone; what an
    error costs behind the next normalization is its part of a token's length, not its size.

    Memory: two square matrices in float32 for each expert.
    """

    def __init__(self, experts: ExpertsModule, *, is_by_length: bool = False) -> None:
        """Begin with nothing seen.

        Args:
            experts: What this stands for.
            is_by_length: Whether tokens count as they are, the long ones more, as in GPTQ.
        """
        super().__init__()
        self._is_by_length = is_by_length
        self.shapes = experts.shapes
        self.label = experts.name
        self._experts = [experts]  # in a list: not a part of this module
        columns = (self.shapes.up[1], self.shapes.down[1])
        self._sums = [torch.zeros(self.shapes.count, width, width) for width in columns]
        self._pooled: dict[int, Tensor] = {}
        self.tokens = torch.zeros(self.shapes.count)

    def _product(self, matrix: int, expert: int, x: Tensor) -> Tensor:
        """Multiply tokens [tokens, columns] by one matrix of an expert."""
        exact = x.detach().to("cpu", torch.float32)
        if not self._is_by_length:
            exact = nn.functional.normalize(exact, dim=1)
        self._sums[matrix][expert].addmm_(exact.T, exact)
        self._pooled.clear()
        if matrix == UP:
            self.tokens[expert] += len(x)
        return nn.functional.linear(x, self._experts[0].weight(expert, matrix))

    def open(self) -> tuple[Product, Product]:
        """Return the products by first and by last matrices."""
        return functools.partial(self._product, UP), functools.partial(self._product, DOWN)

    def on_routed(self, chosen: Sequence[int]) -> None:
        """Read nothing ahead: dense experts are in memory or paged by themselves."""

    def means(self, matrix: int, experts: Sequence[int]) -> Tensor:
        """Return second moments of some experts, [experts, columns, columns].

        Those of an expert that saw few tokens are near the layer's; without any token they are all zero.

        Pre: matrix is ``UP`` or ``DOWN``.
        """
        sums = self._sums[matrix]
        if matrix not in self._pooled:
            self._pooled[matrix] = sums.sum(0) / self.tokens.sum().clamp(min=1)
        borrowed = _TOKENS_OF_THE_REST * sums.shape[-1]
        tokens = self.tokens[list(experts)] + borrowed
        return sums[list(experts)].add_(self._pooled[matrix], alpha=borrowed).div_(tokens[:, None, None])

    def energies(self) -> Tensor:
        """Return how much errors of each expert count, [experts]: its tokens times its mean gain.

        The gain is the square of what its last matrix makes of hidden states of length one. Neither their own lengths
        nor the weights that the router gives are in it. Experts without tokens get a tenth of a mean expert's tokens,
        for texts that were not among these.
        """
        each = [
            (weight @ self.means(DOWN, [expert])[0] * weight).sum()
            for expert in range(self.shapes.count)
            for weight in [self._experts[0].weight(expert, DOWN).detach().to("cpu", torch.float32)]
        ]
        return torch.stack(each).clamp(min=0) * (self.tokens + 0.1 * self.tokens.mean() + 1e-6)


def moments_of(
    modules: Sequence[ExpertsModule], run: Callable[[], None], *, is_by_length: bool = False
) -> dict[str, ExpertMoments]:
    """Run something and return what the modules' experts were given, by the modules' names."""
    moments = {experts.name: ExpertMoments(experts, is_by_length=is_by_length) for experts in modules}
    try:
        for experts in modules:
            experts.observe(moments[experts.name])
        run()
    finally:
        for experts in modules:
            experts.forget()
    return moments
