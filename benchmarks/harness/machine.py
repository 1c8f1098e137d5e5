"""What the machine did meanwhile: CPU seconds of this process and of everybody, and the bandwidth of the raw disk."""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROBE_BYTES = 256 << 20
BLOCK_BYTES = 4 << 20
DEPTH = 4

Transfer = Callable[[int, list[mmap.mmap], int], int]


@dataclass(frozen=True)
class CpuSeconds:
    """CPU seconds spent so far."""

    wall: float
    process: float  # this process, its threads, and children that it waited for
    machine: float  # everybody's programs and the kernel, without interrupts and idling
    stolen: float  # taken by the host of a virtual machine

    @classmethod
    def now(cls) -> "CpuSeconds":
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _wait, _irq, _softirq, stolen = (
            int(word) / ticks for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        own = os.times()
        process = own.user + own.system + own.children_user + own.children_system
        return cls(time.perf_counter(), process, user + nice + system, stolen)

    def since(self, earlier: "CpuSeconds") -> dict[str, float]:
        wall = self.wall - earlier.wall
        process = self.process - earlier.process
        others = max(0.0, self.machine - earlier.machine - process) + self.stolen - earlier.stolen
        share = others / (wall * (os.cpu_count() or 1))
        return {"seconds": wall, "process_cpu_seconds": process, "other_cpu_seconds": others, "other_share": share}


class DiskProbe:
    """Reads and writes an unlinked file past the page cache, a few large blocks at a time."""

    def __init__(self, directory: str, *, probe_bytes: int = PROBE_BYTES) -> None:
        self.probe_bytes = probe_bytes
        path = Path(directory, f".disk-probe-{os.getpid()}")
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        path.unlink()
        os.posix_fallocate(self.descriptor, 0, probe_bytes)
        self.blocks = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(DEPTH)]
        for block in self.blocks:
            block.write(os.urandom(BLOCK_BYTES))
        self.measure(os.pwritev)  # the first pass also allocates

    def measure(self, transfer: Transfer) -> float:
        """Return the bytes per second of `os.preadv` or `os.pwritev` over the whole file."""

        def work(worker: int) -> None:
            for offset in range(worker * BLOCK_BYTES, self.probe_bytes, DEPTH * BLOCK_BYTES):
                if transfer(self.descriptor, [self.blocks[worker]], offset) != BLOCK_BYTES:
                    raise OSError("short transfer in the disk probe")

        started = time.perf_counter()
        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(work, range(DEPTH)))
        return self.probe_bytes / (time.perf_counter() - started)

    def bandwidth(self) -> dict[str, float]:
        """Measure both directions, one after the other."""
        return {"read_bytes_per_second": self.measure(os.preadv), "write_bytes_per_second": self.measure(os.pwritev)}
