"""From the steps of one rank alone to what the model of many (harness/rank_simulation.py) is given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from harness.rank_simulation import Host, Policy, ReadTimes, Stage

Bin = tuple[float, float, int]
TAIL_FROM = 0.99  # from this quantile on, read times are drawn from a power law
STEPS_TO_A_LATE_READ = 20  # of the whole group, with a margin for its tail
MIN_MARGIN_SECONDS, MAX_MARGIN_SECONDS, MARGIN_SHARE = 5e-3, 100e-3, 8  # as in csrc/pager/pager_plan.cpp
MAX_SHARE_AHEAD = 0.25  # of the budget, that holds what was read ahead


@dataclass(frozen=True)
class Rates:
    """Of the machine."""

    cores: int
    mixed: float  # bytes per second of as many reads as writes, both together


@dataclass(frozen=True)
class Work:
    """What one rank does in a step, as one of `ranks`: medians of its steps, and all of its reads.

    Attributes:
        paged: Bytes by kind and processor seconds of a step that pages.
        plain: Processor seconds of one that pages nothing.
        reads: How long reads took.
        layers: Each is gathered by itself, and what is in none of them once more.
        shard_bytes: Of this rank's weights.
        budget_bytes: Of this rank.
    """

    ranks: int
    paged: dict[str, float]
    plain: dict[str, float]
    reads: tuple[Bin, ...]
    layers: int
    shard_bytes: int
    budget_bytes: int

    @classmethod
    def of_steps(
        cls, ranks: int, paged: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], **sizes: int
    ) -> "Work":
        """Sum up what a worker answered for each step."""
        counts: dict[tuple[float, float], int] = {}
        for step in paged:
            for begin, end, count in step["read_times"]:
                counts[begin, end] = counts.get((begin, end), 0) + count
        reads = tuple((*bounds, count) for bounds, count in sorted(counts.items()))
        return cls(ranks, medians(paged), medians(plain), reads, **sizes)

    @property
    def page_bytes(self) -> float:
        """Of a read, in the mean; of a median step, as there may be more of them."""
        return self.paged["read_bytes"] / self.paged["reads"]

    def stages(self, link: dict[str, float]) -> list[Stage]:
        """Return what is between the collectives of a step: a gathering of each layer in the forward and another in
        the backward, where gradients are reduced besides.

        A deferred update is where its weights are next gathered, so the forward reads each page of states, each of
        gradients, and each weight that is away, once; what else is read, the backward reads.
        """
        units = self.layers + 1
        weights = min(self.paged["read_bytes_of_parameter"], self.shard_bytes)
        updated = weights + self.paged["read_bytes_of_state"] + self.paged["read_bytes_of_gradient"]
        pages = [size / self.page_bytes for size in (updated, self.paged["read_bytes"] - updated)]
        from_others = self.shard_bytes * (self.ranks - 1) / units
        gather, reduce = (link[f"{name}_seconds_per_byte"] * from_others for name in ("gather", "reduce"))
        links = [gather, gather + reduce]
        seconds = [self.plain[f"{name}_cpu_seconds"] / units for name in ("forward", "backward")]
        read = [count for each in pages for count in evenly(each, units)]
        written = evenly(self.paged["written_bytes"] / self.page_bytes, 2 * units)
        return [Stage(read[i], written[i], links[i // units], seconds[i // units]) for i in range(2 * units)]

    def host(self, rates: Rates, ranks: int) -> Host:
        """Return the machine: as many requests at once as have the disk move what was measured of reads and writes.

        By Little's law that is the rate times the mean time of a read; times are scaled to make it a whole number.
        """
        slots = self._slots(rates)
        pages = (self.paged["read_bytes"] + self.paged["written_bytes"]) / self.page_bytes
        program = self.plain["forward_cpu_seconds"] + self.plain["backward_cpu_seconds"]
        return Host(
            cores=rates.cores,
            ranks=ranks,
            disk_slots=slots,
            write_seconds=slots * self.page_bytes / rates.mixed,
            page_cpu_seconds=max(0.0, self.paged["cpu_seconds"] - program) / pages,
        )

    def _slots(self, rates: Rates) -> int:
        return max(1, round(self._mean_read_seconds * rates.mixed / self.page_bytes))

    @property
    def _mean_read_seconds(self) -> float:
        return sum((begin + end) / 2 * count for begin, end, count in self.reads) / self._read_count

    @property
    def _read_count(self) -> int:
        return sum(count for *_, count in self.reads)

    def read_times(self, rates: Rates) -> ReadTimes:
        """Return the recorded distribution; beyond a quantile, the power law that Hill's estimator fits to the rest.

        Source: Hill, "A simple general approach to inference about the tail of a distribution", Ann. Statist. 1975.
        """
        shares = tuple(each / self._read_count for each in accumulate(count for *_, count in self.reads))
        threshold = quantile(self.reads, TAIL_FROM)
        tail = [((begin + end) / 2, count) for begin, end, count in self.reads if (begin + end) / 2 > threshold]
        logarithms = sum(math.log(seconds / threshold) * count for seconds, count in tail)
        scale = self._slots(rates) * self.page_bytes / rates.mixed / self._mean_read_seconds
        return ReadTimes(
            begins=tuple(begin for begin, *_ in self.reads),
            ends=tuple(end for _, end, _ in self.reads),
            cumulated=shares,
            tail_from=TAIL_FROM if logarithms > 0 else 1.0,
            tail_seconds=threshold,
            tail_exponent=sum(count for _, count in tail) / logarithms if logarithms > 0 else 1.0,
            scale=scale,
        )

    def policy(self, rates: Rates, *, tail_of: int) -> Policy:
        """Return when reads begin: as today, and with `tail_of` ranks so much earlier as all but one read of the steps
        of all of them took at most, as far as was recorded.
        """
        computing = sum(self.plain[f"{name}_cpu_seconds"] for name in ("forward", "backward"))
        margin = min(MAX_MARGIN_SECONDS, max(MIN_MARGIN_SECONDS, computing / MARGIN_SHARE))
        if tail_of:
            margin += quantile(self.reads, 1 - 1 / (STEPS_TO_A_LATE_READ * tail_of * self.layers))
        window = max(1, int(MAX_SHARE_AHEAD * self.budget_bytes / self.page_bytes))
        return Policy(page_seconds=2 * self.page_bytes / rates.mixed, margin_seconds=margin, window_pages=window)


def quantile(reads: Sequence[Bin], share: float) -> float:
    """Return the seconds within which that share of reads came."""
    wanted = share * sum(count for *_, count in reads)
    for begin, end, count in reads:
        if wanted <= count:
            return begin + (end - begin) * wanted / count
        wanted -= count
    return reads[-1][1]


def evenly(total: float, parts: int) -> list[int]:
    """Return whole numbers as near to equal as they can be, whose sum is the rounded total."""
    return [end - begin for begin, end in pairwise(round(total * i / parts) for i in range(parts + 1))]


def medians(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each number; `reads` is the number of them."""
    counted = [
        {name: value for name, value in step.items() if not isinstance(value, list)}
        | {"reads": sum(count for *_, count in step["read_times"])}
        for step in steps
    ]
    return {name: median(step[name] for step in counted) for name in counted[0]}
