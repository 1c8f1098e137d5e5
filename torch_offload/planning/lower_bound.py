"""What a step cannot be faster than, without a replay: computing alone, and what memory cannot hold between sweeps."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch_offload.planning.fake_trace import PHASES, Recording, What
from torch_offload.planning.operator_costs import Cost
from torch_offload.planning.page_uses import StepShape, StepUses
from torch_offload.planning.step_time import Rates


@dataclass(frozen=True)
class _Sweep:
    """One phase of a step: seconds of computing, bytes of pages that it uses at least once."""

    seconds: float
    used_bytes: int


def lower_bound(
    recording: Recording, shape: StepShape, costs: Mapping[str, Cost], *, memory_bytes: int, rates: Rates
) -> float:
    """Return seconds of a step that no replacement of pages can beat.

    When a phase begins, memory holds at most `memory_bytes` of the pages that the phase uses: it reads the others. Of
    the pages that the update before the first forward changes, or that in the backward, those that it has to read were
    written since the step before.

    Args:
        recording: Of one micro-batch.
        shape: Of the step.
        costs: Of its phases.
        memory_bytes: Of all tiers above the SSD together.
        rates: Of the SSD.
    """
    per_read_byte = 1 / max(rates.ssd_read, rates.ssd_mixed)
    per_written_byte = 1 / max(rates.ssd_write, rates.ssd_mixed)
    pages = StepUses(recording, shape).pages
    sizes: dict[str, int] = {}
    for size_bytes, kind in zip(pages.size_bytes, pages.kinds, strict=True):
        sizes[kind] = sizes.get(kind, 0) + size_bytes
    forward, backward = _used_parameters(recording)
    gradient_bytes = sizes.get("gradient", 0)
    updated_bytes = 0
    if shape.optimizer is not None:
        updated_bytes = sizes.get("state", 0) + (0 if shape.updates_in_backward else gradient_bytes)
    first = (0, updated_bytes) if shape.updates_in_backward else (updated_bytes, 0)
    sweeps = []
    for number in range(shape.micro_batches):
        more = first if number == 0 else (0, gradient_bytes)
        for name, used, extra in zip(PHASES, (forward, backward), more, strict=True):
            sweeps.append(_Sweep(costs[name].seconds, _paged_bytes(recording, used, shape) + extra))
    read = [max(0, sweep.used_bytes - memory_bytes) for sweep in sweeps]
    trained = [index for index in forward if recording.parameters[index].is_trained]
    changed_bytes = _paged_bytes(recording, trained, shape) + updated_bytes if updated_bytes else 0
    written_bytes = max(0, changed_bytes - memory_bytes)
    each = (max(sweep.seconds, count * per_read_byte) for sweep, count in zip(sweeps, read, strict=True))
    return max(sum(each), sum(read) * per_read_byte + written_bytes * per_written_byte)


def _used_parameters(recording: Recording) -> tuple[set[int], set[int]]:
    """Return what the forward and the backward use as a whole, by index: tables that are looked up are left out."""
    used: tuple[set[int], set[int]] = (set(), set())
    is_backward = False
    for moment in recording.moments:
        is_backward = is_backward or moment.what is What.backward
        if moment.what is What.operate and not moment.rows:
            used[is_backward].update(moment.parameters)
    return used


def _paged_bytes(recording: Recording, indices: Collection[int], shape: StepShape) -> int:
    sizes = (recording.parameters[index].size_bytes for index in indices)
    return sum(size for size in sizes if size >= max(shape.min_paged_bytes, 1))
