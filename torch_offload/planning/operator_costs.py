"""Times of operator calls on this machine: measured on tensors of their shapes, or estimated."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_offload.diagnostics.probe import Probe
from torch_offload.planning.operator_calls import Call, Items, TensorShape, tensor_shapes
from torch_offload.runtime.process import PROCESS
from torch_offload.system import resources

logger = logging.getLogger(__name__)

ROUNDS = 5
CACHE_BYTES = 64 << 20  # more than a core's own caches
LONG_SECONDS = 0.3  # a call that takes longer is timed twice
MAX_SHARE_OF_FREE_MEMORY = 0.5
PATTERN_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of some calls.

    Attributes:
        seconds: All of them.
        timed_seconds: Of these, what comes from timing and not from an estimate.
    """

    seconds: float
    timed_seconds: float


class OperatorCosts:
    """Times calls until its time is used up; the most expensive ones first."""

    def __init__(self, probe: Probe, *, limit_seconds: float) -> None:
        """Take the rates of a machine. :meth:`of` times calls.

        Args:
            probe: What estimates are made from.
            limit_seconds: Time to spend on timing, 0 for estimates only.
        """
        self._probe = probe
        self._estimates_only = limit_seconds <= 0
        self._left_seconds = limit_seconds
        self._known: dict[Call, tuple[float, bool]] = {}
        self._caches = torch.frombuffer(bytearray(CACHE_BYTES), dtype=torch.uint8)  # no budget counts it
        self._largest_bytes = int(resources.free_memory_bytes() * MAX_SHARE_OF_FREE_MEMORY)

    def of(self, calls: Mapping[str, Counter[Call]]) -> dict[str, Cost]:
        """Return the cost of each phase; calls that an earlier phase had cost the same."""
        total: Counter[Call] = Counter()
        for counts in calls.values():
            total.update({call: count for call, count in counts.items() if call not in self._known})
        started = time.perf_counter()
        self._known |= self._seconds(total)
        self._left_seconds -= time.perf_counter() - started
        return {phase: _sum_of(counts, self._known) for phase, counts in calls.items()}

    def estimate(self, call: Call) -> float:
        """Return the seconds that the machine's rates allow at best."""
        moved_seconds = (call.input_bytes + call.output_bytes) / self._probe.copy_rate
        types = {str(shape.dtype).removeprefix("torch.") for shape in tensor_shapes(call.arguments)}
        rate = max((self._probe.gemm.get(name, 0.0) for name in types), default=0.0) or min(self._probe.gemm.values())
        return max(call.flops / rate, moved_seconds)

    def _seconds(self, total: "Counter[Call]") -> dict[Call, tuple[float, bool]]:
        """Return the seconds of one call of each, and whether they were timed."""
        estimates = {call: self.estimate(call) for call in total}
        in_order = sorted(total, key=lambda call: -total[call] * estimates[call])
        timed = self._timed([call for call in in_order if call.input_bytes + call.output_bytes <= self._largest_bytes])
        return {call: (timed[call], True) if call in timed else (estimates[call], False) for call in in_order}

    def _timed(self, calls: Sequence[Call]) -> dict[Call, float]:
        """Return the seconds of those that can be timed, and of those that a plan of this process has timed before.

        Each call once, in order, and then all again: what takes the processor away for a second takes one time of each
        call, and not all times of a few. The second least of a call's times counts: the least of calls in a row was
        0.49 s in sum where a step of LoRA took 0.61.
        """
        if self._estimates_only:
            return {}
        known = PROCESS.operator_seconds
        times: dict[Call, list[float]] = {call: [] for call in calls if call not in known}
        until = time.perf_counter() + self._left_seconds
        for _ in range(ROUNDS):
            for call, seconds in times.items():
                expected = min(seconds, default=self.estimate(call))
                is_known_long = len(seconds) > 1 and expected >= LONG_SECONDS
                if call in known or is_known_long or time.perf_counter() + expected >= until:
                    continue
                is_first_short = not seconds and expected < LONG_SECONDS
                measured = timed_seconds(call, self._caches, warm_up=is_first_short)
                if measured is None:
                    known[call] = None
                else:
                    seconds.append(measured)
        known.update({call: sorted(seconds)[:2][-1] for call, seconds in times.items() if seconds})
        return {call: timed for call in calls if (timed := known.get(call)) is not None}


def _sum_of(counts: "Counter[Call]", seconds: Mapping[Call, tuple[float, bool]]) -> Cost:
    return Cost(
        seconds=sum(count * seconds[call][0] for call, count in counts.items()),
        timed_seconds=sum(count * seconds[call][0] for call, count in counts.items() if seconds[call][1]),
    )


def timed_seconds(call: Call, caches: Tensor, *, warm_up: bool) -> float | None:
    """Return the seconds of a call on tensors of its shapes, None where it cannot be made on such tensors.

    Of a call that finds nothing in the caches, as in a step, where others came between.

    Args:
        call: To be made.
        caches: Written before, so that the caches hold that.
        warm_up: Make it once before, so that its kernel has been chosen and loaded.
    """
    bound = _index_bound(call)
    arguments = [_real(value, bound) for value in call.arguments]
    keywords = {name: _real(value, bound) for name, value in call.keywords}
    try:
        with torch.no_grad():
            if warm_up:
                call.operator(*arguments, **keywords)
            caches.add_(1)
            started = time.perf_counter()
            call.operator(*arguments, **keywords)
            return time.perf_counter() - started
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        logger.info("%s cannot be timed alone and is estimated: %s", call, error)
        return None


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
    return _filled(elements, shape.dtype, bound).as_strided(shape.size, shape.stride)


def _filled(elements: int, dtype: torch.dtype, bound: int) -> Tensor:
    """Return random fractions, a pattern of them where there are many; indices; true truth values."""
    if dtype is torch.bool:
        return torch.ones(elements, dtype=dtype)
    if not dtype.is_floating_point:
        return (torch.arange(elements) % bound).to(dtype)
    pattern = torch.rand(min(elements, PATTERN_ELEMENTS)).to(dtype)
    if elements <= PATTERN_ELEMENTS:
        return pattern
    return pattern.repeat(-(-elements // PATTERN_ELEMENTS))[:elements]
