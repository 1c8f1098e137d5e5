"""A report says what a plan predicted beside what was measured, and which input of the plan was wrong.

Method: reports of made-up samples, held against predictions of which one figure is another.
"""

import dataclasses
import json

import pytest
from support.command import run_main
from support.figures import whole_report

from torch_offload import ConfigError, Report
from torch_offload.reporting.prediction import Prediction
from torch_offload.reporting.timeline import Timeline

# A step of `sample`: 2 s, 0.5 s of them stalled, 3 bytes read and 5 written.
RIGHT = Prediction(seconds=2.0, computing_seconds=1.5, ssd_read_bytes=3, ssd_written_bytes=5, peak_bytes=7)


def report_with(prediction: Prediction | None) -> Report:
    return dataclasses.replace(whole_report(), prediction=prediction)


def test_what_is_as_predicted_has_no_wrong_input():
    comparison = report_with(RIGHT).comparison
    assert [(figure.name, figure.excess) for figure in comparison.figures[:3]] == [
        ("seconds", 0.0),
        ("SSD read", 0.0),
        ("SSD written", 0.0),
    ]
    assert comparison.wrong_input is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seconds": 1.0, "computing_seconds": 0.5}, "computing: 0.5 s predicted, 1.5 s measured (+200%)"),
        ({"seconds": 1.6, "ssd_read_bytes": 1}, "bytes over the SSD: 6 bytes predicted, 8 bytes measured"),
        ({"seconds": 1.6}, "rate of the disk: the bytes are as planned"),
    ],
)
def test_the_input_that_differs_most_is_named(changes, named):
    changed = RIGHT.model_copy(update={"computing_seconds": 1.5, **changes})
    assert report_with(changed).comparison.wrong_input.startswith(named)


def test_both_stand_in_every_form_of_the_report(tmp_path):
    report = report_with(RIGHT)
    assert "plan    seconds: 2 s predicted, 2 s measured (+0%)" in str(report)
    assert "plan, SSD read" in [str(name) for name in report.__rich__().columns[0].cells]
    assert json.loads(report.to_json())["comparison"]["figures"][0]["measured"] == 2.0
    report.write_json(tmp_path / "r.json")
    assert Report.read_json(tmp_path / "r.json") == report


def test_a_report_without_a_plan_or_without_steps_compares_nothing():
    assert report_with(None).comparison is None
    assert "plan" not in str(report_with(None))
    assert dataclasses.replace(report_with(RIGHT), timeline=Timeline()).comparison is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"prediction": {"seconds": -1}}', "[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=r"p\.json is not a plan that this version wrote; write one with"):
        Prediction.of_plan(tmp_path / "p.json")


def test_a_saved_report_is_shown_beside_a_plan(monkeypatch, capsys, tmp_path):
    report_with(None).write_json(tmp_path / "r.json")
    plan = tmp_path / "p.json"
    plan.write_text(json.dumps({"prediction": RIGHT.model_dump()}))
    assert run_main(monkeypatch, "report", str(tmp_path / "r.json"), "--plan", str(plan)) == 0
    assert "2 s predicted, 2 s measured" in capsys.readouterr().out
    dataclasses.replace(whole_report(), timeline=None).write_json(tmp_path / "r.json")
    assert run_main(monkeypatch, "report", str(tmp_path / "r.json"), "--plan", str(plan)) == 2
    assert "the report has no steps to compare with a plan" in capsys.readouterr().err


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan: cannot read .*p\.json: No such file"):
        Prediction.of_plan(tmp_path / "p.json")
