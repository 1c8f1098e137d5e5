"""Reports of several ranks of one launch, beside those of other runs in the same directory.

Method: made-up figures, written as processes do, and read by the command.
"""

import json
import os

import pytest
from support.figures import statistics
from typer.testing import CliRunner

from torch_offload import Report
from torch_offload.cli.app import app
from torch_offload.reporting import saved_reports
from torch_offload.reporting.saved_reports import REPORT_NAME
from torch_offload.system import environment
from torch_offload.system.environment import Rank

pytestmark = pytest.mark.any_torch

LAUNCH = "localhost:29500 17"


def write(folder, name, *, number, network, read=3, launch=LAUNCH):
    """Write the report of a process that waited so many seconds for the others, at the second of its name."""
    rank = None if number is None else Rank(number=number, count=4, launch=launch)
    counted = statistics(read=read, stalls={"read": 1.0, "network": network})
    file = folder / f"{REPORT_NAME}-{name}.json"
    Report.from_statistics(counted, rank=rank).write_json(file)
    os.utime(file, (name, name))


@pytest.fixture
def folder(tmp_path):
    """Three of four ranks, after an earlier run of the same ranks and one of a single process."""
    write(tmp_path, 1, number=3, network=90.0, launch="localhost:29500 16")
    write(tmp_path, 2, number=None, network=0.0)
    for name, (number, network) in enumerate(((2, 5.5), (0, 0.25), (1, 5.0)), start=3):
        write(tmp_path, name, number=number, network=network, read=1000 * (number + 1))
    return tmp_path


def test_ranks_of_the_newest_launch_are_shown_side_by_side(folder):
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "torch_offload report of 3 of 4 ranks" in shown.output
    assert "The others waited for rank 0." in shown.output
    (network,) = [line for line in shown.output.splitlines() if "stalled: network" in line]
    assert [cell.strip() for cell in network.strip("│").split("│")] == [
        "stalled: network",
        "0.25 s",
        "5 s",
        "5.5 s",
        "2",
    ]
    (read,) = [line for line in shown.output.splitlines() if line.strip("│ ").startswith("read")]
    assert read.rstrip("│ ").endswith("2")


def test_the_same_as_json(folder):
    shown = CliRunner().invoke(app, ["report", str(folder), "--json"])
    found = json.loads(shown.stdout)
    assert found["ranks"] == 4
    assert found["waited_for"] == 0
    assert found["figures"]["stalled: network"] == {"0": 0.25, "1": 5.0, "2": 5.5}
    assert [report["rank"]["number"] for report in found["reports"]] == [0, 1, 2]


def test_the_newest_of_a_rank_counts(folder):
    """A rank that was started again by the same launcher has written twice."""
    write(folder, 9, number=1, network=0.125)
    reports = saved_reports.of_ranks(folder)
    assert [report.stall_seconds["network"] for report in reports.reports] == [0.25, 0.125, 5.5]
    assert reports.waited_for == 1


def test_one_process_is_shown_as_before(folder):
    write(folder, 9, number=None, network=0.0)
    assert saved_reports.of_ranks(folder) is None
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert "ranks" not in shown.output
    single = folder / f"{REPORT_NAME}-3.json"
    assert saved_reports.of_ranks(single) is None


def test_nobody_waited_for_another(tmp_path):
    for number in range(2):
        write(tmp_path, number, number=number, network=0.0)
    assert saved_reports.of_ranks(tmp_path).waited_for is None


def test_a_rank_is_what_the_launcher_says(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    found = environment.rank()
    assert (found.number, found.count) == (3, 8)
    assert found.launch.startswith("node:1 ")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert environment.rank() is None
    monkeypatch.delenv("WORLD_SIZE")
    assert environment.rank() is None
