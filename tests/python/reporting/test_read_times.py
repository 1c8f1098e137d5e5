"""How long reads took: counted by the engine for each, told in figures and kept in reports."""

import json

import pytest
import torch
from support.paging import assert_was_paged
from torch import nn

import torch_offload
from torch_offload import Config, Report
from torch_offload.reporting.read_times import ReadTimes

pytestmark = pytest.mark.any_torch


def test_quantiles_lie_between_the_bounds_of_their_bin():
    times = ReadTimes(((0.0, 1.0, 98), (4.0, 5.0, 1), (8.0, 9.0, 1)))
    assert times.count == 100
    assert times.quantile(0.49) == 0.5
    assert times.quantile(0.99) == 5.0
    assert times.quantiles() == {"p50": pytest.approx(50 / 98), "p99": 5.0, "max": 9.0}
    assert str(times) == "100: p50 510 ms, p99 5e+03 ms, max 9e+03 ms"


def test_without_reads_there_is_no_time():
    assert ReadTimes().quantile(0.5) == 0.0
    assert ReadTimes().quantiles() == {}
    assert str(ReadTimes()) == "none"


def test_every_read_is_counted_once_and_kept_in_the_report(scratch, tmp_path):
    """Pages of one size, so that bytes say how many reads there were."""
    page_bytes = 4 * 4096
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(64)))
    torch_offload.wrap(layers, config=Config(ram=2 << 20, ssd=scratch, page_elements=4096, min_paged_bytes=0))
    with torch.no_grad():
        for _ in range(3):
            layers(torch.zeros(1, 128))
    assert_was_paged()
    report = torch_offload.report()
    torch_offload.unwrap(layers)
    assert report.read_times.count == report.ssd_read_bytes // page_bytes > 0
    assert 0 < report.read_times.quantile(0.5) <= report.read_times.quantile(1.0)
    report.write_json(tmp_path / "r.json")
    assert Report.read_json(tmp_path / "r.json").read_times == report.read_times
    assert json.loads((tmp_path / "r.json").read_text())["read_seconds"] == report.read_times.quantiles()
