"""The figures of an engine since it started, without the ways to show them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_offload.activations.recompute import ActivationChoice
from torch_offload.reporting.bottleneck import Bottleneck, Wear, bottleneck_of, wear_of
from torch_offload.reporting.prediction import Comparison, Prediction, compare
from torch_offload.reporting.read_times import ReadTimes
from torch_offload.reporting.timeline import Timeline, Traffic, by_purpose
from torch_offload.system.environment import Rank

if TYPE_CHECKING:
    from torch_offload import _C


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """Figures of a device's memory and its links to the host's, since the engine started.

    Attributes:
        name: Which device.
        budget_bytes: The hard limit of its memory.
        used_bytes: Memory in use now, by purpose, as ``Report.host_bytes``.
        peak_bytes: The most that was ever in use; never above the budget.
        to_device_bytes: Bytes that came from the host's memory, by kind of page.
        to_host_bytes: Bytes that went there.
        updates_on: Where optimizers' updates run: ``gpu`` or ``cpu``, as the setting ``optimizer_device`` has them;
            None where a report says nothing of it.
    """

    name: str
    budget_bytes: int
    used_bytes: dict[str, int]
    peak_bytes: int
    to_device_bytes: dict[str, int]
    to_host_bytes: dict[str, int]
    updates_on: str | None = None

    @property
    def has_other_bits(self) -> bool:
        """Whether results may differ in the last bits from a run in the GPU: updates have the CPU's kernels."""
        return self.updates_on == "cpu" and self.name.startswith("cuda")

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any]) -> "DeviceReport":
        """Sort the engine's statistics of its device into a report."""
        rest = dict(statistics)
        memory = rest.pop("memory")
        return cls(
            budget_bytes=memory["limit_bytes"],
            used_bytes=by_purpose(memory),
            peak_bytes=memory["peak_bytes"],
            **rest,
        )


@dataclass(frozen=True, kw_only=True)
class ShareReport:
    """This process's side of a budget that the processes of a launch on this machine share, in bytes.

    Attributes:
        shared_bytes: What all of them share.
        equal_bytes: What each can have whatever the others do.
        guaranteed_bytes: What this one always has.
        leased_bytes: What it has beside that now.
        most_leased_bytes: The most that it ever had beside that.
        given_back_bytes: What it gave back because others wanted it, since the engine started.
    """

    shared_bytes: int
    equal_bytes: int
    guaranteed_bytes: int
    leased_bytes: int
    most_leased_bytes: int
    given_back_bytes: int


@dataclass(frozen=True, kw_only=True)
class Figures(Traffic):
    """Figures since the engine started. Bytes and counts are totals unless they say otherwise.

    Attributes:
        io_engine: How pages are read and written.
        budget_bytes: The hard limit of memory; of a budget that processes share, the most that this one had of it.
        host_bytes: Memory in use now, by purpose: ``pages``, ``free_pages`` (kept for the next page),
            ``temporaries``, ``idle_temporaries`` (kept for reuse), ``small``.
        host_peak_bytes: The most that was ever in use; never above the budget.
        ssd_bytes: Live pages on SSD now.
        ssd_file_bytes: Size of the scratch file now.
        read_bytes: Bytes read from SSD, by kind: ``parameter``, ``gradient``, ``state``, ``activation``, ``other``.
        written_bytes: Bytes written to SSD, by kind.
        read_times: How long single reads from the SSD took.
        pins: Times a page was needed.
        misses: Of those, times it had to be read first.
        hit_rate: Share of pins without a miss, 1 where there were none.
        faults: Accesses behind the dispatcher to absent pages.
        prefetches: Pages read ahead of use.
        evictions: Pages that left memory.
        clean_drops: Of those, pages that left without a write.
        stall_seconds: Seconds in which the program waited, by cause: ``read``, ``memory``, ``update``, ``fault``,
            ``network`` (for other ranks, in a collective).
        counters: Everything else that the engine counts, by name: deferred work, norms, adoptions, and what the disk
            did wrong (``retried_reads``, ``retried_writes``, ``healed_mismatches``, ``quarantined_bytes``).
        share: Of a budget that processes of this machine share, None for one that has its own.
        device: The device's figures, None where the module computes in the host's memory. Pins, misses, faults,
            prefetches and evictions are those of the memory in which it computes, stalls those in either.
        activations: Which layers page the activations of the backward pass and which recompute them, and why; None
            where the engine does not decide it.
        timeline: Samples over time, where they were recorded (``Config.report``, the status line).
        prediction: Of the plan that the run was given (``Config.plan``).
        rank: Of the process among those that train together, None for one that trains alone.
        activities: What :meth:`Report.write_trace` writes, where recorded (``Config.trace``). Not part of the JSON
            and of copies.
    """

    io_engine: str
    budget_bytes: int
    host_bytes: dict[str, int]
    host_peak_bytes: int
    ssd_bytes: int
    ssd_file_bytes: int
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    pins: int
    misses: int
    hit_rate: float
    faults: int
    prefetches: int
    evictions: int
    clean_drops: int
    stall_seconds: dict[str, float]
    counters: dict[str, Any]
    read_times: ReadTimes = field(default_factory=ReadTimes)
    share: ShareReport | None = None
    device: DeviceReport | None = None
    activations: ActivationChoice | None = None
    timeline: Timeline | None = None
    prediction: Prediction | None = None
    rank: Rank | None = None
    activities: "_C.ActivityRecord | None" = field(default=None, compare=False, repr=False)

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The resource that a step waits for most, None where no steps were recorded."""
        steady = None if self.timeline is None else self.timeline.steady()
        return None if steady is None else bottleneck_of(steady.stall_seconds, steady.seconds)

    @property
    def comparison(self) -> Comparison | None:
        """What was predicted beside what was measured, None without a plan or recorded steps."""
        steady = None if self.timeline is None else self.timeline.steady()
        if self.prediction is None or steady is None:
            return None
        peak_bytes = self.host_peak_bytes if self.device is None else self.device.peak_bytes
        return compare(self.prediction, steady, peak_bytes=peak_bytes)

    @property
    def wear(self) -> Wear | None:
        """The wear of the SSD, None where no steps were recorded."""
        steady = None if self.timeline is None else self.timeline.steady()
        if steady is None:
            return None
        return wear_of(steady.ssd_written_bytes, steps=steady.steps, seconds=steady.seconds)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot be copied."""
        return {**self.__dict__, "activities": None}
