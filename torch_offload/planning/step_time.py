"""Time of a step whose bytes move beside its computation: the slowest resource of each phase."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from torch_offload.config import Config
from torch_offload.diagnostics.probe import Probe

COMPUTE = "compute"
HOST_UPDATE = "host update"
SSD = "ssd"
TO_DEVICE = "to device"
TO_HOST = "to host"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of each link."""

    ssd_read: float
    ssd_write: float
    ssd_mixed: float
    to_device: float
    to_host: float


def rates_of(config: Config, probe: Probe, *, processes: int = 1) -> Rates:
    """Return the rates that a run has: those measured, or those that an emulated device and disk are set to.

    Each of several processes has its share of the disk.

    Raises:
        ConfigError: If there is to be a GPU, and it was not measured.
    """
    link, ssd = config.link_rate, config.ssd_rate or inf
    copy_rate = probe.copy_rate / 2  # bytes that arrive
    return Rates(
        ssd_read=min(probe.ssd_read / processes, ssd),
        ssd_write=min(probe.ssd_write / processes, ssd),
        ssd_mixed=min(probe.ssd_mixed / processes, ssd),
        to_device=link or (probe.of_gpu.to_device if config.uses_cuda else copy_rate),
        to_host=link or (probe.of_gpu.to_host if config.uses_cuda else copy_rate),
    )


def paging_seconds(read_bytes: int, written_bytes: int, probe: Probe) -> float:
    """Return the seconds for which moving pages keeps the processor from computing."""
    return read_bytes * probe.read_cost + written_bytes * probe.write_cost


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Computation and traffic of a part of a step, in bytes by kind of page.

    Attributes:
        name: ``forward`` or ``backward``.
        compute_seconds: Of the processor or device that the module computes on.
        paging_seconds: Of the processor for moving pages, while which it computes nothing.
        host_update_seconds: Of updates that run beside it.
        ssd_read: Bytes that came from the SSD.
        ssd_written: Bytes that went there.
        to_device: Bytes that came to the device.
        to_host: Bytes that left it.
    """

    name: str
    compute_seconds: float
    paging_seconds: float = 0.0
    host_update_seconds: float = 0.0
    ssd_read: dict[str, int] = field(default_factory=dict)
    ssd_written: dict[str, int] = field(default_factory=dict)
    to_device: dict[str, int] = field(default_factory=dict)
    to_host: dict[str, int] = field(default_factory=dict)

    def seconds_by_resource(self, rates: Rates) -> dict[str, float]:
        """Return how long each resource is busy at least."""
        ssd = ssd_seconds(sum(self.ssd_read.values()), sum(self.ssd_written.values()), rates)
        return {
            COMPUTE: self.compute_seconds + self.paging_seconds,
            HOST_UPDATE: self.host_update_seconds,
            SSD: ssd,
            TO_DEVICE: sum(self.to_device.values()) / rates.to_device,
            TO_HOST: sum(self.to_host.values()) / rates.to_host,
        }

    def seconds(self, rates: Rates) -> float:
        """Return how long the phase takes: everything in it overlaps."""
        return max(self.seconds_by_resource(rates).values())


def ssd_seconds(read_bytes: int, written_bytes: int, rates: Rates) -> float:
    """Return the seconds of a disk: what moves both ways at once at the rate of a mix, the rest at its own."""
    both = min(read_bytes, written_bytes)
    alone = (read_bytes - both) / rates.ssd_read + (written_bytes - both) / rates.ssd_write
    return 2 * both / rates.ssd_mixed + alone


def total_by_resource(phases: Iterable[Phase], rates: Rates) -> dict[str, float]:
    """Return the seconds of each resource in a whole step; the greatest is its lower bound."""
    total: dict[str, float] = {}
    for phase in phases:
        for name, seconds in phase.seconds_by_resource(rates).items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def total_by_kind(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of bytes by kind."""
    total: dict[str, int] = {}
    for part in parts:
        for kind, size_bytes in part.items():
            total[kind] = total.get(kind, 0) + size_bytes
    return total
