"""The process that keeps pages for machines without an SSD: a server of the engine, until a signal ends it."""

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_offload import _C
from torch_offload.config import Config, format_size
from torch_offload.errors import ConfigError
from torch_offload.places import parse_address
from torch_offload.reporting.result import Result
from torch_offload.runtime import preflight
from torch_offload.system import resources

ENDED_BY = (signal.SIGINT, signal.SIGTERM)
LOG_SECONDS = 1.0
"""How long a line of the engine waits before it is in the log."""


@dataclasses.dataclass(frozen=True)
class ServedPages(Result):
    """What a store has done. Bytes are those of pages, unless it says otherwise.

    Attributes:
        clients: That were welcome, one after the other or at once.
        received_bytes: That clients sent and that were kept.
        sent_bytes: That clients got back.
        damaged_bytes: That came with another checksum than they were sent with, and were not kept.
        updates: Pages whose weights it updated for clients.
        update_bytes: That said how.
        budget_bytes: Of memory.
        peak_bytes: The most memory that pages had.
        peak_lent_bytes: Of that, the most that was being received or sent at one time.
        ssd_bytes: The size of the scratch file.
        ssd_read_bytes: That memory had no room for and were read from it.
        ssd_written_bytes: The same, written to it.
    """

    clients: int
    received_bytes: int
    sent_bytes: int
    damaged_bytes: int
    updates: int
    update_bytes: int
    budget_bytes: int
    peak_bytes: int
    peak_lent_bytes: int
    ssd_bytes: int
    ssd_read_bytes: int
    ssd_written_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.clients} clients sent {format_size(self.received_bytes)} of pages and got "
            f"{format_size(self.sent_bytes)}, {self.updates} pages were updated here; "
            f"memory {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}, "
            f"scratch file {format_size(self.ssd_bytes)}, read {format_size(self.ssd_read_bytes)}, "
            f"written {format_size(self.ssd_written_bytes)}"
        )


def serve(listen: str, config: Config, *, tell: Callable[[str], None], updates: bool = True) -> ServedPages:
    """Keep pages of whoever connects until SIGINT or SIGTERM. For the main thread.

    Args:
        listen: ``host:port`` of this machine; port 0 is one that is free.
        config: Its ``ram``, ``ssd`` and limits of the disk, those of transfers as well.
        tell: Gets one line when clients may connect.
        updates: Whether optimizers' updates run here, for clients whose kernels give the same bits.

    Raises:
        ConfigError: If a setting cannot be used.
        TierIOError: If the port is taken, or the scratch file cannot be made.
    """
    address = parse_address(listen)
    if config.stores:
        raise ConfigError(f"ssd: a store keeps pages on a disk of its own, got {config.ssd}; give a directory")
    decided = preflight.resolve(config)
    directories = decided.directories_of(0)
    with _interruption() as is_interrupted:
        server = _C.PageServer(
            listen=address,
            budget_bytes=decided.ram or 0,
            directories=[str(directory) for directory in directories],
            io_engine=decided.io_engine,
            queue_depth=decided.queue_depth,
            io_timeout=decided.io_timeout,
            keep_free_bytes=[resources.kept_bytes(place, keep_free=decided.keep_free) for place in directories],
            max_file_bytes=None if decided.max_spill is None else decided.max_spill // len(directories),
            runs_updates=updates,
        )
        try:
            places = ", ".join(map(str, directories))
            tell(f"store at {server.address}: {format_size(decided.ram or 0)} of memory, then {places}")
            while not is_interrupted.wait(LOG_SECONDS):
                server.statistics()  # takes the log along
            return _served(server.statistics())
        finally:
            server.close()


@contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Give what is set by the first signal that ends a store. (CPython's sigtimedwait takes a stop for one.)"""
    is_interrupted = threading.Event()
    before = {number: signal.signal(number, lambda *_: is_interrupted.set()) for number in ENDED_BY}
    try:
        yield is_interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _served(figures: dict[str, Any]) -> ServedPages:
    return ServedPages(
        clients=figures["clients_so_far"],
        received_bytes=figures["received_bytes"],
        sent_bytes=figures["sent_bytes"],
        damaged_bytes=figures["damaged_bytes"],
        updates=figures["updates"],
        update_bytes=figures["update_bytes"],
        budget_bytes=figures["memory"]["limit_bytes"],
        peak_bytes=figures["memory"]["peak_bytes"],
        peak_lent_bytes=figures["peak_lent_bytes"],
        ssd_bytes=figures["file_bytes"],
        ssd_read_bytes=figures["ssd_read_bytes"],
        ssd_written_bytes=figures["ssd_written_bytes"],
    )
