"""The page on reliability says what the record of the fault programme holds; records of too little are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parents[3]
RECORD, PAGE = "benchmarks/results/faults.json", "docs/reliability.md"
LONG_RECORD = "benchmarks/results/faults_long.json"
OPERATIONS = "benchmarks/results/operations.json"


def run_tool(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/fault_page.py"), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """This repository's records and page."""
    for name in (RECORD, LONG_RECORD, OPERATIONS, PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_page_of_this_repository_is_as_generated(tree):
    checked = run_tool(tree, "--check")
    assert checked.returncode == 0, checked.stderr


def test_page_that_says_something_else_is_found(tree):
    (tree / PAGE).write_text((tree / PAGE).read_text().replace("crashed", "fine"))
    checked = run_tool(tree, "--check")
    assert checked.returncode == 1
    assert "run: python tools/fault_page.py" in checked.stderr


@pytest.mark.parametrize(
    ("record", "place", "value", "said"),
    [
        (RECORD, ("code", "modified_files"), ["csrc/pager/pager.cpp"], "measured with files that differ"),
        (RECORD, ("harnesses", "NthIo", "reached"), 2399, "no whole, passing run of NthIo"),
        (RECORD, ("harnesses", "Kill", "injected"), 1499, "no whole, passing run of Kill"),
        (RECORD, ("harnesses", "FullDisk", "has_failed"), True, "no whole, passing run of FullDisk"),
        (LONG_RECORD, ("harnesses", "Kill", "injected"), 1499, "no whole, passing run of Kill: make fault-long"),
        (OPERATIONS, ("operations", "operations"), 999_999, "no passing run of 1,000,000 operations"),
        (OPERATIONS, ("has_failed",), True, "no passing run of 1,000,000 operations"),
        (OPERATIONS, ("code", "modified_files"), ["csrc/pager/pager.cpp"], "measured with files that differ"),
    ],
)
def test_record_of_too_little_is_refused(tree, record, place, value, said):
    content = json.loads((tree / record).read_text())
    part = content
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (tree / record).write_text(json.dumps(content))
    checked = run_tool(tree, "--check")
    assert checked.returncode == 1
    assert said in checked.stderr
