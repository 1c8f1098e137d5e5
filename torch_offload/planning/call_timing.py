"""Times one call of an operator on tensors of its shapes, where these are: on a processor or a GPU."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_offload.planning.operator_calls import Call, Items, TensorShape, packet_name, tensor_shapes

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 << 20  # more than a core's own caches
GPU_CACHE_BYTES = 256 << 20  # more than a GPU's second level
PATTERN_ELEMENTS = 1 << 20
GROUPED_PRODUCT = "aten._grouped_mm"


class Caches:
    """What lies in the caches of whatever computes, so that nothing of a call does."""

    def __init__(self) -> None:
        """Take memory for a processor's; a GPU's is taken when first needed."""
        host = torch.frombuffer(bytearray(CACHE_BYTES), dtype=torch.uint8)  # no budget counts it
        self._contents: dict[torch.device | None, Tensor] = {None: host}

    def fill(self, gpu: torch.device | None) -> None:
        """Write more than the caches of a GPU hold; None: of the processor."""
        if gpu not in self._contents:
            self._contents[gpu] = torch.zeros(GPU_CACHE_BYTES, dtype=torch.uint8, device=gpu)
        self._contents[gpu].add_(1)


def timed_seconds(call: Call, caches: Caches, *, warm_up: bool) -> float | None:
    """Return the seconds of a call on tensors of its shapes, None where it cannot be made on such tensors.

    Of a call that finds nothing in the caches, as in a step, where others came between.

    Args:
        call: To be made.
        caches: Filled before.
        warm_up: Make it once before, so that its kernel has been chosen and loaded.
    """
    try:
        arguments, keywords = _real_arguments(call)
        with torch.no_grad():
            if warm_up:
                call.operator(*arguments, **keywords)
            caches.fill(call.gpu)
            return _seconds_of(lambda: call.operator(*arguments, **keywords), call.gpu)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        logger.info("%s cannot be timed alone and is estimated: %s", call, error)
        return None


def _seconds_of(work: Callable[[], object], gpu: torch.device | None) -> float:
    """Return how long the processor works, or a GPU from where it begins until it has ended."""
    if gpu is None:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()  # behind the filling of the caches, in which time the call's kernels are queued
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _real_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments that a call can be made with, positional ones and the others."""
    bound = _index_bound(call)
    arguments = [_real(value, bound) for value in call.arguments]
    if packet_name(call.operator) == GROUPED_PRODUCT:
        arguments[2] = _group_ends(call)
    return arguments, {name: _real(value, bound) for name, value in call.keywords}


def _group_ends(call: Call) -> Tensor:
    """Return where each group of a grouped product ends: all have the same length."""
    left, right, ends = call.arguments[:3]
    total = left.size[0] if len(right.size) > len(left.size) else left.size[-1]
    (count,) = ends.size
    return torch.tensor([total * number // count for number in range(1, count + 1)], device=ends.device).to(ends.dtype)


def _index_bound(call: Call) -> int:
    """Return what indices have to stay below, whichever tensor and dimension they count."""
    sizes = [shape.size for shape in tensor_shapes(call.arguments) if shape.dtype.is_floating_point]
    return max(1, min((length for size in sizes for length in size), default=1))


def _real(value: Any, bound: int) -> Any:
    """Return an argument that a call can be made with."""
    if isinstance(value, TensorShape):
        return _tensor(value, bound)
    if isinstance(value, Items):
        return [_real(item, bound) for item in value.items]
    return value


def _tensor(shape: TensorShape, bound: int) -> Tensor:
    elements = 1 + sum((length - 1) * step for length, step in zip(shape.size, shape.stride, strict=True))
    elements = max(elements, 0) if all(shape.size) else 0
    return _filled(elements, shape.dtype, bound, shape.device).as_strided(shape.size, shape.stride)


def _filled(elements: int, dtype: torch.dtype, bound: int, device: torch.device) -> Tensor:
    """Return random fractions, a pattern of them where there are many; indices; true truth values."""
    if dtype is torch.bool:
        return torch.ones(elements, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return (torch.arange(elements, device=device) % bound).to(dtype)
    pattern = torch.rand(min(elements, PATTERN_ELEMENTS), device=device).to(dtype)
    if elements <= PATTERN_ELEMENTS:
        return pattern
    return pattern.repeat(-(-elements // PATTERN_ELEMENTS))[:elements]
