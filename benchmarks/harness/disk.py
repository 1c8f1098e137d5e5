"""The rate of the disk: the one definition that every benchmark divides by.

It is what our I/O program (benchmarks/native) moves past the page cache in blocks of 2 MiB, 16 in flight, with buffers
in huge pages: the fastest way that is known here, up to twice as fast as buffers in pages of 4 KiB. Reads, writes and
their mix are measured one after the other, between the steps of the run that is judged.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import io_program

PROBE_BYTES = 256 << 20
MIB = 1 << 20


class DiskProbe:
    """A file that is read and written between steps."""

    def __init__(self, directory: str, *, probe_bytes: int = PROBE_BYTES) -> None:
        self.probe_bytes = probe_bytes
        self._program = io_program.build()
        self._folder = tempfile.TemporaryDirectory(dir=directory, prefix=".disk-probe-")
        self._file = Path(self._folder.name, "blocks")
        self._rate("write")  # the first pass also allocates

    def bandwidth(self) -> dict[str, float]:
        """Measure bytes per second of reads, of writes and of both at once."""
        rates = {"read": self._rate("read"), "write": self._rate("write"), "mix": self._rate("mix")}
        return {f"{direction}_bytes_per_second": rate for direction, rate in rates.items()}

    def _rate(self, direction: str) -> float:
        shape = {"file_bytes": self.probe_bytes, "direction": direction, "mib": self.probe_bytes // MIB}
        moved = io_program.run(self._program, self._file, huge_pages=True, **shape)
        return float((moved["read_bytes"] + moved["written_bytes"]) / moved["seconds"])


class DiskCounters:
    """What the kernel counted of the disk below a directory since this was made: was it busy while somebody waited?"""

    def __init__(self, directory: str) -> None:
        device = os.stat(directory).st_dev
        self._file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        self._before, self._started = self._counts(), time.perf_counter()

    def since(self) -> dict[str, float]:
        """Return the share of the time in which requests were under way, how many at once, and what a read took.

        A slow step beside a busy disk with a full queue waited for the disk; beside an idle one, for the engine.
        Empty where the file system lies on no block device of its own.
        """
        if not self._before:
            return {}
        delta = [after - before for after, before in zip(self._counts(), self._before, strict=True)]
        reads, read_ms, busy_ms, waited_ms = delta[0], delta[3], delta[9], delta[10]
        return {
            "disk_busy_share": busy_ms / 1e3 / (time.perf_counter() - self._started),
            "disk_requests_at_once": waited_ms / max(1, busy_ms),
            "disk_read_milliseconds": read_ms / max(1, reads),
        }

    def _counts(self) -> list[int]:
        return [int(word) for word in self._file.read_text().split()[:11]] if self._file.exists() else []


def seconds_at_disk_rate(disk: dict[str, Any], *, read_bytes: float, written_bytes: float) -> float:
    """Return the least time that the disk needs for some bytes: all by direction, or as many as can be both at once."""
    read_rate, write_rate = disk["read_bytes_per_second"], disk["write_bytes_per_second"]
    at_once = min(read_bytes, written_bytes)
    apart = read_bytes / read_rate + written_bytes / write_rate
    rest = (read_bytes - at_once) / read_rate + (written_bytes - at_once) / write_rate
    return float(min(apart, 2 * at_once / disk["mix_bytes_per_second"] + rest))
