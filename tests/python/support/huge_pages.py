"""What the system holds in huge pages."""

from pathlib import Path

import pytest

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def skip_where_there_are_none() -> None:
    if "[never]" in ENABLED.read_text():
        pytest.skip(f"{ENABLED}: this system has no huge pages")


def huge_page_bytes() -> int:
    """Anonymous memory of this process that the system holds in huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not count huge pages")
