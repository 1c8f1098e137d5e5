"""`torch-offload plan --search`: what it prints, what it writes, its exit status, its errors."""

import json

import pytest
from support.command import run_main

pytestmark = pytest.mark.any_torch

STEP = ("--search", "--tokens-per-step", "32", "--sequence", "8", "--page-elements", "8192")


@pytest.fixture
def configured(monkeypatch, scratch):
    """A directory with the configuration of a small model, on a machine that is known already."""
    from support.figures import MACHINE
    from support.models import tiny_config

    from torch_offload.cli import plan_search as module

    monkeypatch.setattr(module, "probe_with_progress", lambda *_, **__: MACHINE)
    monkeypatch.setattr(module, "DEFAULT_TIMING_SECONDS", 0.0)
    tiny_config("llama", tied=False, hidden=256, layers=2).save_pretrained(scratch)
    return scratch


def run_plan(monkeypatch, capsys, configured, *options: str):
    status = run_main(monkeypatch, "plan", str(configured), "--ssd", str(configured), *STEP, *options)
    return status, capsys.readouterr()


def test_a_search_is_json(monkeypatch, capsys, configured):
    status, said = run_plan(monkeypatch, capsys, configured, "--ram", "8MiB", "--json")
    found = json.loads(said.out)
    assert (status, found["tokens_per_step"]) == (0, 32)
    assert found["best"]["rows"] * found["best"]["accumulation"] == 4
    assert found["plan"]["fits"] is True
    assert {(each["rows"], each["accumulation"]) for each in found["candidates"]} == {(4, 1), (2, 2), (1, 4)}
    assert found["advice"].startswith(f"per_device_train_batch_size={found['best']['rows']}, gradient_accumulation")


def test_a_search_is_a_table_with_reasons(monkeypatch, capsys, configured):
    status, said = run_plan(monkeypatch, capsys, configured, "--ram", "8MiB", "--why", "--as-is", "1x4")
    assert status == 0
    for words in (
        "rows x accumulation",
        "32 tokens per step",
        "Use: per_device_train_batch_size=",
        "yours, 1 x 4, page",
    ):
        assert words in said.out
    assert "s a step, " in said.out
    assert "x)" in said.out


def test_what_if_is_a_table_and_a_page(monkeypatch, capsys, configured, tmp_path):
    options = ("--ram", "64KiB,8MiB,64MiB", "--ssd-rate", "0.1GB/s,5GB/s", "--html", str(tmp_path / "p.html"))
    status, said = run_plan(monkeypatch, capsys, configured, *options)
    assert status == 0
    for words in ("what if", "0.1 GB/s", "5 GB/s", "64 MiB", "nothing fits", f"{tmp_path}/p.html written"):
        assert words in said.out
    page = (tmp_path / "p.html").read_text()
    assert page.count("Plotly.newPlot(") == 3
    assert "Roofline" in page


def test_where_nothing_fits_the_status_says_so(monkeypatch, capsys, configured):
    status, said = run_plan(monkeypatch, capsys, configured, "--ram", "64KiB")
    assert status == 1
    assert "does not fit" in said.out
    assert "lacks least: ram lacks" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--search", "--search needs --tokens-per-step"),
        ("--tokens-per-step 64 --why", "--tokens-per-step, --why: of a search; give --search as well"),
        ("--search --tokens-per-step 60 --sequence 16", "the nearest are 48 or 64"),
        ("--search --tokens-per-step 64 --sequence 16 --batch 2", "--batch and --micro-batches are what --search"),
        (
            "--search --tokens-per-step 64 --sequence 16 --as-is 1x8",
            "--as-is 1x8: 8 rows, but a step of these tokens has 4",
        ),
        (
            "--search --tokens-per-step 64 --sequence 16 --as-is eight",
            "--as-is: expected rows and accumulation such as 1x8",
        ),
        (
            "--search --tokens-per-step 64 --sequence 16 --schedule auto",
            "--search chooses how one process trains; leave",
        ),
        ("--search --tokens-per-step 64 --sequence 16 --allow fp8", "allow: 'fp8' is not known; there are: bf16"),
        ("--search --tokens-per-step 64 --sequence 16 --ssd-rate fast", "ssd-rate: cannot read 'fast' as a rate"),
        ("--search --tokens-per-step 64 --sequence 16 --ram 1GiB,2GX", "cannot read '2GX' as a size"),
    ],
)
def test_mistakes_are_named_with_what_helps(monkeypatch, capsys, configured, options, expected):
    assert run_main(monkeypatch, "plan", str(configured), "--ssd", str(configured), *options.split()) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1
