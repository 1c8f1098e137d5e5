"""What a profile of a GPU's step is made into, from spans that are made up; a real one needs a GPU."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness.gpu_timeline import Span, busy_seconds, longest, spans_of, thread_seconds, timeline

pytestmark = pytest.mark.any_torch

MATRIX = "nvjet_sm90_tst_320x128"
SPANS = [
    Span(MATRIX, 10.00, 10.10),
    Span("Memcpy HtoD (Pinned -> Device)", 10.05, 10.20),
    Span(MATRIX, 10.08, 10.16),
    Span("Memcpy DtoH (Device -> Pinned)", 10.18, 10.22),
]


def test_what_overlaps_is_busy_once():
    assert busy_seconds(SPANS, 10.0, 11.0) == pytest.approx(0.22)
    assert busy_seconds(SPANS, 10.06, 10.21) == pytest.approx(0.15)
    assert busy_seconds([], 0.0, 1.0) == 0.0


def test_each_slice_says_what_was_busy():
    """Kernels to 10.16, copies from 10.05 to 10.20 and from 10.18 to 10.22, in slices of 0.1 s."""
    expected = [
        {"compute": 1.0, "to device": 0.5, "to host": 0.0},
        {"compute": 0.6, "to device": 1.0, "to host": 0.2},
        {"compute": 0.0, "to device": 0.0, "to host": 0.2},
    ]
    assert timeline(SPANS) == [pytest.approx(slice_of) for slice_of in expected]


def test_kernels_are_summed_up_by_name():
    first = longest(SPANS, most=1)
    assert first == [{"name": MATRIX, "seconds": pytest.approx(0.18), "count": 2}]


def test_a_profile_without_a_gpu_has_no_spans():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(4).sum()
    assert spans_of(profile) == []
    assert any(event.time_range.end > event.time_range.start for event in profile.events() or ())


def test_threads_are_known_by_their_names():
    before = thread_seconds()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    after = thread_seconds()
    assert sum(after.values()) > sum(before.values())
    assert set(before) <= set(after)
