"""Files of reports and traces: their names, and reading them."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from torch_offload.errors import ConfigError
from torch_offload.reporting.prediction import Prediction
from torch_offload.reporting.rank_reports import RankReports
from torch_offload.reporting.report import Report

REPORT_NAME = "torch-offload-report"
TRACE_NAME = "torch-offload-trace"


def report_file(path: Path) -> Path:
    """Return the file that this process writes for a ``report`` setting: `path`, or a file in it."""
    return _file_of_process(path, REPORT_NAME, ".json")


def trace_file(path: Path) -> Path:
    """Return the file that this process writes for a ``trace`` setting: `path`, or a file in it."""
    return _file_of_process(path, TRACE_NAME, ".json.gz")


def _file_of_process(path: Path, name: str, suffix: str) -> Path:
    return path / f"{name}-{os.getpid()}{suffix}" if path.is_dir() or not path.suffix else path


def load(path: Path) -> Report:
    """Read a report, of a directory the newest one.

    Raises:
        ConfigError: If there is none. The message names the command that writes one.
    """
    if path.is_dir():
        reports = _reports_in(path)
        if not reports:
            raise ConfigError(f"no report in {path}; write one with: torch-offload run --report {path} SCRIPT")
        path = max(reports, key=_time_of)
    if not path.exists():
        raise ConfigError(f"there is no report {path}; write one with: torch-offload run --report {path} SCRIPT")
    return Report.read_json(path)


def of_ranks(path: Path) -> RankReports | None:
    """Read what the ranks of the newest launch wrote in a directory, of each rank the newest; None if it was no launch.

    Raises:
        ConfigError: If one of its reports cannot be read.
    """
    newest = load(path)
    if not path.is_dir() or newest.rank is None:
        return None
    reports = [Report.read_json(file) for file in sorted(_reports_in(path), key=_time_of)]
    launched = (report for report in reports if report.rank is not None and report.rank.launch == newest.rank.launch)
    by_rank = {report.rank.number: report for report in launched if report.rank is not None}
    return RankReports(reports=tuple(by_rank[number] for number in sorted(by_rank)))


def _reports_in(directory: Path) -> list[Path]:
    return [entry for entry in directory.glob(f"{REPORT_NAME}*.json") if entry.is_file()]


def _time_of(file: Path) -> int:
    return file.stat().st_mtime_ns


def with_plan(report: Report, plan: Path) -> Report:
    """Return the report with the prediction of a plan beside it.

    Raises:
        ConfigError: If the file is no plan, or the report has no steps.
    """
    compared = dataclasses.replace(report, prediction=Prediction.of_plan(plan))
    if compared.comparison is None:
        raise ConfigError("the report has no steps to compare with a plan; record them with torch-offload run --report")
    return compared


def wear_lines(report: Report, endurance_bytes: int | None) -> Iterator[str]:
    """Say for how long a drive is rated, where its endurance was given."""
    wear = report.wear
    if wear is None or endurance_bytes is None:
        return
    days = wear.days(endurance_bytes)
    lasts = "is not worn: nothing is written" if days is None else f"lasts {days:,.0f} days of such training"
    yield f"A drive rated for {endurance_bytes / 1e12:.4g} TB written {lasts}."
