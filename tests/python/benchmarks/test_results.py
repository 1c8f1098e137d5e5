"""Documents say of benchmarks what the results hold; results that say too little of themselves are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parents[3]
MARKED = "Before.\n<!-- generated: results -->\nanything\n<!-- end -->\nAfter.\n"
BARS = [
    {"name": "rate", "value": 0.97, "target": 0.95, "relation": "at least", "holds": True},
    {"name": "share", "value": 0.58, "target": 0.85, "relation": "at least", "holds": False},
]


def run_tool(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/results_tables.py"), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def measured(**code: Any) -> dict[str, Any]:
    """A result of the I/O benchmark."""
    machine = {"processor": "a processor", "cores": 2, "memory_bytes": 24e9, "kernel": "6.18"}
    machine["disk"] = {"device": "/dev/vda", "file_system": "ext4", "model": "a disk"}
    known = {
        "commit": "c0ffee" + 34 * "0",
        "modified_files": [],
        "date": "2026-11-24T08:00:00+00:00",
        "torch": "2.13.0",
    }
    return {"code": known | code, "benchmark": "io", "machine": machine, "bars": BARS}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One result and documents that are as generated."""
    write(tmp_path / "benchmarks/results/io.json", measured())
    (tmp_path / "docs/contributing").mkdir(parents=True)
    (tmp_path / "README.md").write_text(MARKED)
    coding = tmp_path / "docs/concepts/coded-experts.md"
    coding.parent.mkdir()
    coding.write_text("Nothing was coded.\n")
    assert run_tool(tmp_path).returncode == 0
    return tmp_path


def page_of(tree: Path) -> str:
    return (tree / "docs/contributing/results.md").read_text()


def test_documents_of_this_repository_are_as_generated():
    """README, its chart and the page of results say what the files in benchmarks/results hold."""
    checked = run_tool(ROOT, "--check")
    assert checked.returncode == 0, checked.stderr


def test_a_page_says_what_was_measured_and_what_fails(tree):
    """Commit, day, torch, machine and disk stand above the bars; a bar that fails is marked and comes first."""
    text = page_of(tree)
    for said in ("c0ffee", "2026-11-24", "torch 2.13.0", "a processor", "24 GB", "kernel 6.18", "a disk", "ext4"):
        assert said in text
    assert "| share | at least 0.85 | 0.58 | **fails** |" in text
    assert "| rate | at least 0.95 | 0.97 | yes |" in text
    assert "| io | share | at least 0.85 | 0.58 |" in text.partition("## The I/O engine against fio")[0]
    readme = (tree / "README.md").read_text()
    assert (readme[:8], readme[-7:], "anything" in readme) == ("Before.\n", "After.\n", False)


@pytest.mark.parametrize("document", ["README.md", "docs/contributing/results.md", "benchmarks/results/io.json"])
def test_a_changed_number_is_found(tree, document):
    """The check names the document that differs and the command, and writes nothing. Method: a digit is changed."""
    path = tree / document
    old, new = ("not measured yet", "3 x") if document == "README.md" else ("0.58", "0.59")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = page_of(tree)
    checked = run_tool(tree, "--check")
    assert checked.returncode == 1
    assert ("README.md" if document == "README.md" else "docs/contributing/results.md") in checked.stderr
    assert "run: python tools/results_tables.py" in checked.stderr
    assert page_of(tree) == before


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ({"commit": ""}, "names no commit"),
        ({"modified_files": ["csrc/pager/pager.cpp"]}, "csrc/pager/pager.cpp"),
        ({"command": "python benchmarks/io.py --smoke --json"}, "is of a smoke run"),
    ],
)
def test_a_result_of_unknown_code_is_refused(tree, code, said):
    """Without a commit, or with files that differ from it, nothing is written; what to run is named."""
    write(tree / "benchmarks/results/io.json", measured(**code))
    before = page_of(tree)
    refused = run_tool(tree)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert refused.stderr.startswith("benchmarks/results/io.json ")
    assert "python benchmarks/io.py --json --ssd DIR > benchmarks/results/io.json" in refused.stderr
    assert page_of(tree) == before


def test_a_result_from_before_commits_were_recorded_is_refused_among_the_others(tree):
    """The form that results had before, without `code`, is accepted only where it is listed as such."""
    old = {key: value for key, value in measured().items() if key != "code"}
    path = write(tree / "benchmarks/results/io.json", old)
    assert "names no commit" in run_tool(tree).stderr
    shutil.move(path, write(tree / "benchmarks/results/without_commit/io.json", {}))
    assert run_tool(tree).returncode == 0
    text = page_of(tree)
    assert "## Measured before results recorded their commit" in text
    assert "| io (old) | share | at least 0.85 | 0.58 |" in text


CODED = {"bits": 0.8, "loss_adapted": 4.1, "loss_dense_adapted": 3.9}


def coded(model: str, loss: float) -> dict[str, Any]:
    """The result of one model of one seed."""
    variants = [("bf16", 16.0, 4.0, 1.0), ("zeroed", 0.0, 9.0, 0.0), ("ours", 0.7999, loss, 0.95)]
    keys = ("method", "bits", "loss", "value_retained")
    rows = [dict(zip(keys, variant, strict=True)) for variant in variants]
    shares = ("rate_at_qmoes_error", "recovered", "recovered_at_most_bits")
    of_dense = [f"{name}_of_dense_with_adapters" for name in shares[1:]]
    summary = {name: {"median": 0.5, "min": 0.25, "max": 0.75} for name in [*shares, *of_dense]}
    return measured() | {
        "results": [{"model": model, "seed": 0, "variants": rows, "adapters": CODED}],
        "summary": {model: summary},
    }


def test_the_page_on_coded_experts_says_what_coding_cost(tree):
    """By model, from two results; one without the other is refused, and so is a page without a place for them."""
    page = tree / "docs/concepts/coded-experts.md"
    marked = "".join(f"<!-- generated: coding {name} -->\n<!-- end -->\n" for name in ("losses", "shares"))
    write(tree / "benchmarks/results/expert_quality_upcycled.json", coded("upcycled", 4.25))
    write(tree / "benchmarks/results/expert_quality_small.json", coded("qwen3", 4.0625))
    assert "needs the results" in run_tool(tree).stderr
    page.write_text(marked)
    assert run_tool(tree).returncode == 0
    assert "| this project | 0.80 b: 0.25 (0.25 to 0.25; 0.95) | 0.80 b: 0.0625 (0.0625 to 0.0625; 0.95) |" in (
        page.read_text()
    )
    assert "won back by adapters | 0.50 (0.25 to 0.75) | 0.50 (0.25 to 0.75) |" in page.read_text()
    (tree / "benchmarks/results/expert_quality_small.json").unlink()
    assert "needs the results" in run_tool(tree).stderr


def test_a_disturbed_result_says_so(tree):
    """Wherever in the result it stands."""
    assert "Disturbed" not in page_of(tree)
    write(tree / "benchmarks/results/io.json", measured() | {"workloads": [{"disturbed": True}]})
    assert run_tool(tree).returncode == 0
    assert "**Disturbed:**" in page_of(tree)


def test_an_old_result_beside_a_new_one_is_refused(tree):
    """What was measured anew has no old numbers beside it."""
    write(tree / "benchmarks/results/without_commit/io.json", measured())
    assert "was measured anew: git rm benchmarks/results/without_commit/io.json" in run_tool(tree).stderr


def test_a_correction_of_an_old_bar_counts_as_what_it_says(tree):
    """A bar that held by a wrong denominator is listed among those that fail."""
    (tree / "benchmarks/results/io.json").unlink()
    write(tree / "benchmarks/results/without_commit/io.json", measured())
    notes = {"io": {"note": "A weak probe.", "corrections": {"rate": "**fails**: 0.32 of the disk's rate"}}}
    write(tree / "benchmarks/results/without_commit/notes.json", notes)
    assert run_tool(tree).returncode == 0
    assert "| io (old) | rate | at least 0.95 | 0.97, but **fails**: 0.32 of the disk's rate |" in page_of(tree)
    assert "A weak probe." in page_of(tree)


def test_a_readme_without_a_place_for_the_table_is_refused(tree):
    """Both markers are needed."""
    (tree / "README.md").write_text(MARKED.replace("<!-- end -->", ""))
    assert "<!-- end -->" in run_tool(tree).stderr


def test_a_readme_that_quotes_a_result_that_is_not_there_is_refused(tree):
    """What to measure is named."""
    (tree / "README.md").write_text(MARKED + "<!-- generated: figures -->\n<!-- end -->\n")
    refused = run_tool(tree, "--check")
    assert refused.returncode == 1
    assert "python benchmarks/train_step.py --json --ssd DIR > benchmarks/results/train_step.json" in refused.stderr


def test_a_chart_that_differs_is_found(tmp_path):
    """And drawn anew. Method: this repository's results, and a chart with another number."""
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    shutil.copytree(ROOT / "docs/concepts", tmp_path / "docs/concepts")
    assert run_tool(tmp_path).returncode == 0
    chart = tmp_path / "docs/images/step_by_memory.svg"
    drawn = chart.read_text()
    chart.write_text(drawn.replace(" GB</text>", " kB</text>"))
    checked = run_tool(tmp_path, "--check")
    assert (checked.returncode, "docs/images/step_by_memory.svg" in checked.stderr) == (1, True)
    assert run_tool(tmp_path).returncode == 0
    assert chart.read_text() == drawn
