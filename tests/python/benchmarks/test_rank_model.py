"""The model of many ranks says what can be worked out by hand, and draws read times as they were recorded."""

import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from harness.rank_model import Rates, Work, evenly
from harness.rank_simulation import Host, Policy, ReadTimes, Stage, simulate
from scale_tables import scale_tables

pytestmark = pytest.mark.any_torch

READ_SECONDS = 0.01
ALIKE = ReadTimes(
    begins=(READ_SECONDS,), ends=(READ_SECONDS,), cumulated=(1.0,), tail_from=1.0, tail_seconds=0.0, tail_exponent=1.0
)
SOME_SLOW = ReadTimes(
    begins=(READ_SECONDS, 0.2), ends=(READ_SECONDS, 0.2), cumulated=(0.99, 1.0), tail_from=1.0, tail_seconds=0.0,
    tail_exponent=1.0,
)  # fmt: skip
HOST = Host(cores=2, ranks=1, disk_slots=2, write_seconds=0.0, page_cpu_seconds=0.0)
LATE = Policy(page_seconds=READ_SECONDS / 2, margin_seconds=0.0, window_pages=24)
COMPUTED = [Stage(pages_read=0, pages_written=0, link_seconds=0.002, compute_seconds=0.008)] * 4
READ = [Stage(pages_read=6, pages_written=0, link_seconds=0.0, compute_seconds=0.0)] * 4
BOTH = [Stage(pages_read=1, pages_written=0, link_seconds=0.0, compute_seconds=0.04)] * 8

WORK = Work(
    ranks=2,
    paged={
        "read_bytes": 900.0, "read_bytes_of_parameter": 500.0, "read_bytes_of_gradient": 100.0,
        "read_bytes_of_state": 300.0, "written_bytes": 600.0, "reads": 9, "cpu_seconds": 1.5,
    },
    plain={"forward_cpu_seconds": 0.25, "backward_cpu_seconds": 0.75},
    reads=((0.01, 0.02, 980), (0.02, 0.03, 10), (0.05, 0.06, 8), (0.4, 0.5, 2)),
    layers=3,
    shard_bytes=400,
    budget_bytes=4000,
)  # fmt: skip
RATES = Rates(cores=2, mixed=20_000.0)


def test_without_reads_a_step_is_what_is_computed_and_sent():
    found = simulate(3, HOST, COMPUTED, ALIKE, LATE, steps=2, seed=1)
    assert found.step_seconds == [pytest.approx(0.04)] * 2
    assert found.seconds_by_cause["computing"] == pytest.approx(0.032)
    assert found.seconds_by_cause["other ranks"] == pytest.approx(0)


def test_ranks_that_share_a_core_take_turns():
    one_core = replace(HOST, cores=1, ranks=2)
    assert simulate(2, one_core, COMPUTED, ALIKE, LATE, steps=1, seed=1).step_seconds == [pytest.approx(0.08)]


def test_a_disk_that_is_never_idle_takes_as_long_as_its_reads():
    """Two at once, 24 a step."""
    found = simulate(1, HOST, READ, ALIKE, LATE, steps=2, seed=1)
    assert found.step_seconds == [pytest.approx(12 * READ_SECONDS)] * 2
    assert found.most_pages_ahead <= LATE.window_pages


def test_all_wait_for_the_slowest_disk_unless_reads_begin_earlier():
    """One read in a hundred takes twenty times as long: of 64 ranks, nearly each stage meets one."""
    alone, many = (simulate(ranks, HOST, BOTH, SOME_SLOW, LATE, steps=4, seed=1).step_seconds[-1] for ranks in (1, 64))
    early = simulate(64, HOST, BOTH, SOME_SLOW, replace(LATE, margin_seconds=0.2), steps=4, seed=1)
    assert many > 2 * alone
    assert early.step_seconds[-1] == pytest.approx(8 * 0.04)
    assert 5 <= early.most_pages_ahead <= 7
    narrow = replace(LATE, margin_seconds=0.2, window_pages=2)
    assert simulate(64, HOST, BOTH, SOME_SLOW, narrow, steps=4, seed=1).most_pages_ahead == 2


def test_read_times_are_drawn_as_they_were_recorded():
    """Half of 20,000 are within the first half, and of those beyond 0.99 a half is beyond where the law says."""
    times, random = WORK.read_times(RATES), Random(7)
    drawn = sorted(times.draw(random) / times.scale for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(0.01 + 0.01 * 0.5 / 0.98, rel=0.01)
    assert drawn[19_800] == pytest.approx(times.tail_seconds, rel=0.05)
    assert drawn[19_900] == pytest.approx(times.tail_seconds * 2 ** (1 / times.tail_exponent), rel=0.1)


def test_work_of_one_rank_is_divided_among_stages():
    """Each weight, gradient and state once in the forward, what else was read in the backward; all bytes are there."""
    stages = WORK.stages({"gather_seconds_per_byte": 0.001, "reduce_seconds_per_byte": 0.002})
    assert len(stages) == 2 * (3 + 1)
    assert [sum(stage.pages_read for stage in half) for half in (stages[:4], stages[4:])] == [8, 1]
    assert sum(stage.pages_written for stage in stages) == 6
    assert sum(stage.compute_seconds for stage in stages) == pytest.approx(1.0)
    assert [stages[0].link_seconds, stages[4].link_seconds] == [pytest.approx(0.1), pytest.approx(0.3)]
    host = WORK.host(RATES, 2)
    assert host.disk_slots * WORK.page_bytes / host.write_seconds == pytest.approx(RATES.mixed)
    assert host.page_cpu_seconds == pytest.approx(0.5 / 15)
    assert evenly(7, 3) == [2, 3, 2]


def test_a_margin_for_more_ranks_is_longer_as_far_as_reads_were_recorded():
    margins = [WORK.policy(RATES, tail_of=ranks).margin_seconds for ranks in (0, 1, 8, 10**6)]
    assert margins == sorted(margins)
    assert margins[0] == pytest.approx(0.1)
    assert margins[-1] == pytest.approx(0.1 + 0.5, rel=1e-4)


def test_every_simulated_figure_of_the_page_is_called_so():
    step = {
        "margin_seconds": 0.1, "step_seconds": 1.0, "over_two_ranks": 1.5, "share_of_budget_ahead": 0.2,
        "seconds_by_cause": {"computing": 1.0, "link": 1.0, "own disk": 1.0, "other ranks": 1.0},
    }  # fmt: skip
    content = {
        "one_of_many": [],
        "validation": [
            {"ranks": 2, "measured_seconds": {"median": 1.0, "min": 0.9, "max": 1.1}, "model": step, "error": -0.1}
        ],
        "simulated": [{"ranks": 4096, "today": step, "tail_margin": step}],
        "inputs": {"works": {"2": {"tail": {"reads_recorded": 9, "from_quantile": 0.9, "seconds": 1, "exponent": 2}}}},
    }
    page = scale_tables(content)
    assert "| 2 | 1.00 s (0.90 to 1.10) | 1.00 s | -10.0% |" in page
    before, after = page.split("**Simulated**")
    assert "4,096" not in before
    assert after.count("| 4,096 |") == 2
