"""What the machine did meanwhile: CPU seconds of this process and of everybody, bytes that this process read."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


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

    def since(self, earlier: "CpuSeconds", *, worked: float = 0) -> dict[str, float]:
        """Return what went by; `worked` are CPU seconds of other processes that count as this one's."""
        wall = self.wall - earlier.wall
        process = self.process - earlier.process + worked
        others = max(0.0, self.machine - earlier.machine - process) + self.stolen - earlier.stolen
        share = others / (wall * (os.cpu_count() or 1))
        return {"seconds": wall, "process_cpu_seconds": process, "other_cpu_seconds": others, "other_share": share}


def read_bytes_of_process() -> int:
    """Return what this process has had the disk read, mapped files included."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("read_bytes:") + 1])
