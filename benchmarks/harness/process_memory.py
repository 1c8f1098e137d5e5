"""Resident memory of this process, how plain torch gets huge pages, and what the machine swapped."""

import os
from pathlib import Path

PLAIN_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
"""Environment in which malloc and torch ask for huge pages, as the pager does for its frames."""


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most that was resident since the start or the last `forget_peak`."""
    return _status_bytes("VmHWM")


def huge_page_bytes() -> int:
    """Return how much of this process's own memory lies in huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    """Begin a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def swapped_bytes() -> dict[str, float]:
    """Return what the whole machine moved from and to swap so far."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return {f"swap_{way}_bytes": float(counters[f"pswp{way}"]) * page_bytes for way in ("in", "out")}
