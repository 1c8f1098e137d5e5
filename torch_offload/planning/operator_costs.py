"""Times of operator calls on this machine: measured on tensors of their shapes, or estimated."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_offload.diagnostics.probe import Probe
from torch_offload.planning.call_timing import Caches, timed_seconds
from torch_offload.planning.operator_calls import Call, tensor_shapes
from torch_offload.runtime.process import PROCESS
from torch_offload.system import gpu, resources

ROUNDS = 5
LONG_SECONDS = 0.3  # a call that takes longer is timed twice
MAX_SHARE_OF_FREE_MEMORY = 0.5


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
        self._caches = Caches()

    def of(self, calls: Mapping[str, Counter[Call]]) -> dict[str, Cost]:
        """Return the cost of each phase; calls that an earlier phase had cost the same."""
        total: Counter[Call] = Counter()
        for counts in calls.values():
            total.update({call: count for call, count in counts.items() if call not in self._known})
        started = time.perf_counter()
        self._known |= self._seconds(total)
        self._left_seconds -= time.perf_counter() - started
        if any(call.gpu is not None for call in total):
            gpu.give_back_cache()
        return {phase: _sum_of(counts, self._known) for phase, counts in calls.items()}

    def estimate(self, call: Call) -> float:
        """Return the seconds that the machine's rates allow at best."""
        rates = self._probe if call.gpu is None else self._probe.of_gpu
        moved_seconds = (call.input_bytes + call.output_bytes) / rates.copy_rate
        types = {str(shape.dtype).removeprefix("torch.") for shape in tensor_shapes(call.arguments)}
        rate = max((rates.gemm.get(name, 0.0) for name in types), default=0.0) or min(rates.gemm.values())
        return max(call.flops / rate, moved_seconds)

    def _seconds(self, total: "Counter[Call]") -> dict[Call, tuple[float, bool]]:
        """Return the seconds of one call of each, and whether they were timed."""
        estimates = {call: self.estimate(call) for call in total}
        in_order = sorted(total, key=lambda call: -total[call] * estimates[call])
        largest = {device: _largest_bytes(device) for device in {call.gpu for call in in_order}}
        small = [call for call in in_order if call.input_bytes + call.output_bytes <= largest[call.gpu]]
        timed = self._timed(small)
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


def _largest_bytes(device: torch.device | None) -> int:
    """Return the bytes of tensors that a call may be timed on: a part of the memory that is free there."""
    free_bytes = resources.free_memory_bytes() if device is None else gpu.free_bytes(device)
    return int(free_bytes * MAX_SHARE_OF_FREE_MEMORY)


def _sum_of(counts: "Counter[Call]", seconds: Mapping[Call, tuple[float, bool]]) -> Cost:
    return Cost(
        seconds=sum(count * seconds[call][0] for call, count in counts.items()),
        timed_seconds=sum(count * seconds[call][0] for call, count in counts.items() if seconds[call][1]),
    )
