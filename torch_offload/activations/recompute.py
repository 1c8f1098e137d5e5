"""Layers that compute their activations again in backward instead of keeping them, and for which of them that pays.

The model is that of Ratel (arXiv 2403.06504, section 4): a step takes as long as its computation or its traffic,
whichever is longer. Activations that are computed again cost computation and save traffic, so layers are taken in the
order of the seconds that a saved byte costs, until both take the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

TRIPS_OF_AN_ACTIVATION = 2  # it leaves and comes back


@dataclass(frozen=True)
class LayerCost:
    """Cost of keeping one layer's saved tensors, and of computing them again.

    Attributes:
        name: Qualified, in the wrapped module.
        seconds: Of its forward, waits aside.
        saved_bytes: Of activations that it saves and that are large enough to leave memory.
    """

    name: str
    seconds: float
    saved_bytes: int


@dataclass(frozen=True)
class ActivationChoice:
    """A decision and its reason.

    Attributes:
        recomputed: Names of the layers that compute their activations again.
        paged: Names of the others.
        explanation: One sentence.
    """

    recomputed: list[str] = field(default_factory=list)
    paged: list[str] = field(default_factory=list)
    explanation: str = "the first steps are being measured; every layer's activations are paged"


@dataclass(frozen=True)
class StepTraffic:
    """A step as it was measured while every layer kept its activations.

    Attributes:
        compute_seconds: Of the step without its waits.
        other_bytes: Moved over the binding link for parameters, gradients and states.
        activation_bytes: The same for activations.
        bytes_per_second: What the link carried.
    """

    compute_seconds: float
    other_bytes: float
    activation_bytes: float
    bytes_per_second: float

    def seconds(self, *, without_bytes: float = 0, more_seconds: float = 0) -> float:
        """Return the seconds of a step: the slower of traffic and computation.

        Args:
            without_bytes: Activation bytes that do not move.
            more_seconds: Computation that is added.
        """
        moved = self.other_bytes + max(0.0, self.activation_bytes - without_bytes)
        return max(moved / self.bytes_per_second, self.compute_seconds + more_seconds)


def worth_recomputing(costs: Sequence[LayerCost], traffic: StepTraffic) -> list[LayerCost]:
    """Return the layers that make a step shorter if their activations are computed again, cheapest bytes first."""
    chosen: list[LayerCost] = []
    saved_bytes, added_seconds = 0.0, 0.0
    before = traffic.seconds()
    candidates = [cost for cost in costs if cost.saved_bytes > 0]
    for cost in sorted(candidates, key=lambda cost: cost.seconds / cost.saved_bytes):
        saved_bytes += TRIPS_OF_AN_ACTIVATION * cost.saved_bytes
        added_seconds += cost.seconds
        after = traffic.seconds(without_bytes=saved_bytes, more_seconds=added_seconds)
        if after >= before:
            break
        chosen.append(cost)
        before = after
    return chosen


def layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can compute their forward again: those that transformers can checkpoint one by one.

    Layers for which the user has asked for checkpointing himself are his.
    """
    for name, layer in all_layers_of(module):
        if not getattr(layer, "gradient_checkpointing", False) or is_recomputed(layer):
            yield name, layer


def all_layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that transformers can checkpoint one by one, in the order of the module."""
    for name, layer in module.named_modules():
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(layer).__mro__):
            yield name, layer


def is_recomputed(layer: nn.Module) -> bool:
    """Whether :func:`set_recomputed` has switched it on."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return bool(getattr(layer, "gradient_checkpointing", False)) and function is _checkpoint


def set_recomputed(layer: nn.Module, *, on: bool) -> None:
    """Have a layer compute its activations again in backward, or keep them. Numbers stay the same either way."""
    if on:
        layer._gradient_checkpointing_func = _checkpoint  # type: ignore[assignment]
        layer.gradient_checkpointing = True  # type: ignore[assignment]
    elif is_recomputed(layer):
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def _checkpoint(layer: Callable[..., Any], *args: Any) -> Any:
    """Run a layer that its backward runs again. A cache of keys would be given its keys twice: transformers leaves out
    those that it passes by name, and models that pass them by position know of checkpointing in all of their layers.
    """
    return checkpoint(layer, *(None if _is_cache(value) else value for value in args), use_reentrant=False)


def _is_cache(value: Any) -> bool:
    return any(base.__name__ == "Cache" for base in type(value).__mro__)
