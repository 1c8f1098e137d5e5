"""The same search on machines that differ in memory and disk: what would change the step, and by how much."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_offload.config import format_size, parse_size
from torch_offload.diagnostics.probe import Probe
from torch_offload.errors import ConfigError
from torch_offload.planning.search_result import Search
from torch_offload.reporting.result import Result

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of a table.

    Attributes:
        ram_bytes: Its budget.
        ssd_rate: Bytes per second, each way; None: as measured.
    """

    ram_bytes: int
    ssd_rate: float | None

    def probe(self, measured: Probe) -> Probe:
        """Return the rates of this machine, where `measured` are those of the one at hand."""
        if self.ssd_rate is None:
            return measured
        names = ("ssd_read", "ssd_write", "ssd_mixed")
        return measured.model_copy(update=dict.fromkeys(names, self.ssd_rate))

    def __str__(self) -> str:
        """Return it in words."""
        disk = "its own disk" if self.ssd_rate is None else f"{self.ssd_rate / 1e9:.4g} GB/s"
        return f"{format_size(self.ram_bytes)}, {disk}"


@dataclass(frozen=True, kw_only=True)
class WhatIf(Result):
    """Searches of one step on several machines.

    Attributes:
        searches: By machine, in the order in which they were asked for.
    """

    searches: list[tuple[Machine, Search]]

    @property
    def fits(self) -> bool:
        """Whether one of the machines can train it."""
        return any(search.best is not None for _, search in self.searches)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        return {
            "machines": [
                {"ram_bytes": machine.ram_bytes, "ssd_rate": machine.ssd_rate, "search": search.to_dict()}
                for machine, search in self.searches
            ]
        }

    def why(self) -> Iterator[str]:
        """Yield the lines of each search, behind the machine."""
        for machine, search in self.searches:
            yield f"{machine}:"
            yield from (f"  {line}" for line in search.why())

    def __rich__(self) -> "Table":
        """Return the machines as a table for rich."""
        from torch_offload.system.tables import PlainTable

        headings = ("memory", "disk", "rows x accumulation", "way", "step", "tokens/s", "SSD a step", "binds")
        table = PlainTable(*headings, title="torch_offload plan --search: what if", title_style="bold")
        for machine, search in self.searches:
            table.add_row(*_row(machine, search))
        return table


def _row(machine: Machine, search: Search) -> list[str]:
    disk = "as it is" if machine.ssd_rate is None else f"{machine.ssd_rate / 1e9:.4g} GB/s"
    begin = [format_size(machine.ram_bytes), disk]
    best = search.best
    if best is None or best.plan is None:
        return [*begin, "", search.advice, "", "", "", ""]
    figures = [f"{best.seconds:.3g} s", f"{best.plan.tokens_per_second:.4g}", format_size(best.ssd_bytes)]
    return [*begin, best.setup.split, best.setup.way, *figures, best.plan.bottleneck]


def sizes_of(text: str) -> list[int]:
    """Return the sizes of a list such as ``8GiB,16GiB``.

    Raises:
        ConfigError: If one cannot be read, or is 0.
    """
    sizes = [parse_size(part) for part in text.split(",")]
    if 0 in sizes:
        raise ConfigError(f"ram: expected more than 0, got {text!r}")
    return sizes


def rates_of(text: str) -> list[float]:
    """Return the bytes per second of a list such as ``3GB/s,7GB/s``.

    Raises:
        ConfigError: If one cannot be read, or is 0.
    """
    rates = []
    for part in text.split(","):
        try:
            rate = parse_size(part.strip().removesuffix("/s"))
        except ConfigError:
            raise ConfigError(f"ssd-rate: cannot read {part!r} as a rate; give such as 3GB/s or 500MB/s") from None
        if rate == 0:
            raise ConfigError(f"ssd-rate: expected more than 0, got {part!r}")
        rates.append(float(rate))
    return rates


def machines_of(ram_bytes: Sequence[int], ssd_rates: Sequence[float]) -> list[Machine]:
    """Return every pair of a budget and a rate; no rate means that of the disk as it is."""
    rates: Sequence[float | None] = ssd_rates or (None,)
    return [Machine(ram_bytes=ram, ssd_rate=rate) for ram in ram_bytes for rate in rates]
