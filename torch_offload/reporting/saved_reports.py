"""Reports that runs have written."""

from collections.abc import Iterator
from pathlib import Path

from torch_offload.errors import ConfigError
from torch_offload.reporting.recorder import REPORT_NAME
from torch_offload.reporting.report import Report


def load(path: Path) -> Report:
    """Read a report, of a directory the newest one.

    Raises:
        ConfigError: If there is none. The message names the command that writes one.
    """
    if path.is_dir():
        found = list(path.glob(f"{REPORT_NAME}*.json"))
        if not found:
            raise ConfigError(f"no report in {path}; write one with: torch-offload run --report {path} SCRIPT")
        path = max(found, key=lambda entry: entry.stat().st_mtime)
    if not path.exists():
        raise ConfigError(f"there is no report {path}; write one with: torch-offload run --report {path} SCRIPT")
    return Report.read_json(path)


def wear_lines(report: Report, endurance_bytes: int | None) -> Iterator[str]:
    """Say for how long a drive is rated, where its endurance was given."""
    wear = report.wear()
    if wear is None or endurance_bytes is None:
        return
    days = wear.days(endurance_bytes)
    lasts = "is not worn: nothing is written" if days is None else f"lasts {days:,.0f} days of such training"
    yield f"A drive rated for {endurance_bytes / 1e12:.4g} TB written {lasts}."
