"""Times of operator calls on this machine: measured on tensors of their shapes, or estimated."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_offload.diagnostics.probe import Probe
from torch_offload.planning.operator_calls import Call, Items, TensorShape, tensor_shapes
from torch_offload.runtime.process import PROCESS
from torch_offload.system import resources

logger = logging.getLogger(__name__)

REPETITIONS = 4
CACHE_BYTES = 64 << 20  # more than a core's own caches
LONG_SECONDS = 0.3  # a call that takes longer is timed once
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
            limit_seconds: Time to spend on timing.
        """
        self._probe = probe
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
        spent_until = time.perf_counter() + self._left_seconds
        found = {}
        for call in sorted(total, key=lambda call: -total[call] * estimates[call]):
            fits = call.input_bytes + call.output_bytes <= self._largest_bytes
            has_time = time.perf_counter() + estimates[call] < spent_until
            timed = self._timed(call) if fits and has_time else None
            found[call] = (estimates[call], False) if timed is None else (timed, True)
        return found

    def _timed(self, call: Call) -> float | None:
        """Time a call that no plan of this process has timed yet."""
        known = PROCESS.operator_seconds
        if call not in known:
            known[call] = timed_seconds(call, self._caches)
        return known[call]


def _sum_of(counts: "Counter[Call]", seconds: Mapping[Call, tuple[float, bool]]) -> Cost:
    return Cost(
        seconds=sum(count * seconds[call][0] for call, count in counts.items()),
        timed_seconds=sum(count * seconds[call][0] for call, count in counts.items() if seconds[call][1]),
    )


def timed_seconds(call: Call, caches: Tensor) -> float | None:
    """Return the seconds of a call on tensors of its shapes, None where it cannot be made on such tensors.

    Of calls that find nothing in the caches, as in a step, where others came between. The least of calls in a row was
    0.49 s in sum where a step of LoRA took 0.61. Of five the second least counts: other programs may disturb three.

    Args:
        call: To be made.
        caches: Written before each time, so that the caches hold that.
    """
    bound = _index_bound(call)
    arguments = [_real(value, bound) for value in call.arguments]
    keywords = {name: _real(value, bound) for name, value in call.keywords}
    try:
        with torch.no_grad():
            seconds = [_time(call.operator, arguments, keywords, caches)]
            repetitions = REPETITIONS if seconds[0] < LONG_SECONDS else 0
            seconds += [_time(call.operator, arguments, keywords, caches) for _ in range(repetitions)]
            return sorted(seconds)[:2][-1]
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        logger.info("%s cannot be timed alone and is estimated: %s", call, error)
        return None


def _time(operator: Any, arguments: list[Any], keywords: dict[str, Any], caches: Tensor) -> float:
    caches.add_(1)
    started = time.perf_counter()
    operator(*arguments, **keywords)
    return time.perf_counter() - started


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
