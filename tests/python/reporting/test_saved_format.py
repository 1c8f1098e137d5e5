"""A report that somebody else wrote: read as what it is, or refused with a sentence; its page runs nothing of it."""

import copy
import dataclasses
import io
import json
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.command import run_main
from support.figures import sample, statistics, whole_report

from torch_offload import ConfigError, Report
from torch_offload.activations.recompute import ActivationChoice
from torch_offload.reporting import charts, report, saved_format
from torch_offload.reporting.figures import DeviceReport, Figures
from torch_offload.reporting.html_page import page_of
from torch_offload.reporting.read_times import ReadTimes
from torch_offload.reporting.timeline import Sample, Timeline

pytestmark = pytest.mark.any_torch

REFUSED = r"is not a report that this version of torch_offload wrote \(.+\); write one with `torch-offload run --report"


def read(tmp_path, content) -> Report:
    path = tmp_path / "r.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Report.read_json(path)


@pytest.mark.parametrize(
    ("saved", "written"),
    [
        (saved_format.SavedReport, Figures),
        (saved_format.SavedTimeline, Timeline),
        (saved_format.SavedSample, Sample),
        (saved_format.SavedReadTimes, ReadTimes),
        (saved_format.SavedDevice, DeviceReport),
        (saved_format.SavedActivations, ActivationChoice),
    ],
)
def test_what_is_read_is_what_is_written(saved, written):
    names = {field.name for field in dataclasses.fields(written)} - {"activities"}
    assert {name for name, field in saved.model_fields.items() if not field.exclude} == names


def test_a_whole_report_comes_back_equal(tmp_path):
    assert read(tmp_path, whole_report().to_json()) == whole_report()


LONG = "x" * (saved_format.MAX_NAME_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("pins", "7", "pins: Input should be a valid integer, got '7'"),
        ("pins", 7.0, "pins: Input should be a valid integer, got 7.0"),
        ("pins", 10**400, "pins: "),
        ("pins", 2**63, "pins: "),
        ("hit_rate", 1.5, "hit_rate: Input should be less than or equal to 1, got 1.5"),
        ("stall_seconds", {"read": float("nan")}, "stall_seconds.read: "),
        ("stall_seconds", {"read": -1}, "stall_seconds.read: "),
        ("io_engine", LONG, "io_engine: String should have at most 1024 characters, got 'xxx"),
        ("counters", {LONG: 1}, "counters.xxx"),
        ("counters", {"retried_reads": "many"}, "counters.retried_reads"),
        ("read_bytes", {str(number): 1 for number in range(saved_format.MAX_NAMES + 1)}, "read_bytes: Dictionary"),
        ("read_times", {"bins": [[0.1, 0.2, 0]]}, "read_times.bins.0.2: Input should be greater than 0, got 0"),
        ("timeline", {"recent": [], "step_ends": [{}]}, "timeline.step_ends.0.seconds: Field required"),
        ("added", 1, "added: Extra inputs are not permitted, got 1"),
        ("\x1b[2K", 1, r"\x1b[2K: Extra inputs are not permitted, got 1"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(tmp_path, monkeypatch, capsys, place, value, expected):
    content = whole_report().to_dict() | {place: value}
    with pytest.raises(ConfigError, match=REFUSED):
        read(tmp_path, content)
    assert run_main(monkeypatch, "report", str(tmp_path / "r.json")) == 2
    assert f"({expected}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "9" * 5000, '{"io_engine": "\\ud800"}', "\x00"])
def test_what_is_no_json_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=REFUSED):
        read(tmp_path, text)


def test_what_is_too_long_or_no_file_is_refused(tmp_path, monkeypatch):
    """Method: a bound that a report is beyond; a pipe that nobody writes to, by its name and as the newest report."""
    monkeypatch.setattr(report, "MAX_REPORT_BYTES", 100)
    with pytest.raises(ConfigError, match=r"\(more than 100 bytes\)"):
        read(tmp_path, whole_report().to_json())
    os.mkfifo(tmp_path / "torch-offload-report-1.json")
    with pytest.raises(ConfigError, match="no regular file"):
        Report.read_json(tmp_path / "torch-offload-report-1.json")
    (tmp_path / "r.json").unlink()
    assert run_main(monkeypatch, "report", str(tmp_path)) == 2


def nodes(owner):
    """Yield every place of a JSON value."""
    keys = list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
    for key in keys:
        yield owner, key
        yield from nodes(owner[key])


def read_or_refused(path) -> Report | None:
    try:
        return Report.read_json(path)
    except ConfigError as error:
        message = str(error)
    assert re.search(REFUSED, message, re.DOTALL)
    return None


STRANGE = st.one_of(
    st.sampled_from(["", "[/b]", "\x1b[2K", "<a href='x'>", -1, 0, 1, 1.5, 2**62, 2**63, 10**400, 1e12, 1e308, 5e-324]),
    st.sampled_from([None, True, [], {}, [{}], {"a": 1}, float("nan"), float("inf")]),
    st.text(max_size=5),
    st.integers(),
    st.floats(),
)


@settings(max_examples=300)
@given(data=st.data())
def test_a_changed_report_is_shown_or_refused(tmp_path_factory, data):
    """Method: values of a real report changed, dropped, doubled or moved, up to eight at once; what is read is shown
    as a table, as text, as JSON and as a page.
    """
    root = {"": whole_report().to_dict()}
    for _ in range(data.draw(st.integers(1, 8))):
        places = list(nodes(root))
        if not places:
            break
        owner, key = places[data.draw(st.integers(0, len(places) - 1))]
        change = data.draw(st.sampled_from(["put", "put", "put", "drop", "double", "move"]))
        if change == "put":
            owner[key] = copy.deepcopy(data.draw(STRANGE))  # a drawn list or dict is the same object every time
        elif change == "drop":
            del owner[key]
        elif change == "double" and isinstance(owner, list):
            owner.append(json.loads(json.dumps(owner[key])))
        elif isinstance(owner, dict):
            owner[data.draw(st.text(max_size=3))] = owner.pop(key)
    path = tmp_path_factory.getbasetemp() / "changed-report.json"
    path.write_text(json.dumps(root.get("", 0)))
    found = read_or_refused(path)
    if found is None:
        return
    Console(file=io.StringIO(), width=200).print(found)
    assert str(found)
    assert found.to_json()
    page_of(found, endurance_bytes=600 * 10**12)


@settings(max_examples=200)
@given(said=st.binary(max_size=40), at=st.integers(0, 10_000), is_insert=st.booleans())
def test_bytes_of_a_report_may_be_anything(tmp_path_factory, said, at, is_insert):
    text = whole_report().to_json().encode()
    at %= len(text)
    path = tmp_path_factory.getbasetemp() / "changed-report.json"
    path.write_bytes(text[:at] + said + text[at if is_insert else at + len(said) :])
    read_or_refused(path)


@pytest.mark.parametrize("field", ["seconds", "steps"])
def test_a_run_that_stands_still_is_shown(tmp_path, field):
    """Method: steps that end at one moment, or that are the same one."""
    samples = [dataclasses.replace(sample(number), **{field: 3}) for number in range(1, 5)]
    found = read(
        tmp_path, dataclasses.replace(whole_report(), timeline=Timeline(recent=samples, step_ends=samples)).to_json()
    )
    Console(file=io.StringIO(), width=200).print(found)
    page_of(found, endurance_bytes=1)


def test_names_in_charts_are_no_html():
    """Plotly reads tags in the names of bars and areas."""
    link = "<a href='https://example.org'>x</a>"
    content = statistics(used=7, stalls={link: 1.0}) | {"read_bytes": {link: 1}, "written_bytes": {link: 2}}
    samples = [
        dataclasses.replace(sample(number), stall_seconds={link: float(number)}, host_bytes={link: 1}, device_bytes={})
        for number in range(1, 5)
    ]
    shown = Report.from_statistics(content, timeline=Timeline(recent=samples, step_ends=samples))
    figures = [chart["figure"].to_json() for chart in charts.charts_of(shown)]
    assert len(figures) == 4
    for figure in figures:
        text = json.dumps(json.loads(figure)["data"])
        assert "&lt;a href=" in text
        assert "<a" not in text
    assert link not in page_of(shown)


def test_the_page_may_load_nothing_and_run_only_itself():
    page = page_of(whole_report())
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == "'unsafe-inline'"
    assert page.index("Content-Security-Policy") < page.index("<script>")
