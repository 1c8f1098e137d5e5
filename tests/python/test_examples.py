"""Every example runs as a user starts it, pages within its budget and leaves what it promises.

Method: each script in a process of its own, without a network and without --model, so that it makes its tiny model. The
reports that processes write when they end say that bytes moved and what was the most in memory.
"""

import importlib
import io
import json
import os
import queue
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HELPERS = {"example_run", "tiny_model"}
MAX_LINES = 60
BUDGET_BYTES = 24 << 20
TRAINED = {"plain_loop", "trainer", "dpo"}
ALL = {*TRAINED, "lora", "generate", "compressed_moe", "without_a_module"}

pytestmark = pytest.mark.any_torch


def run_example(name: str, folder: Path, scratch: Path, *options: str, **settings: Any) -> tuple[str, list[Any]]:
    """Run it in `folder`; return what it printed and the reports of its processes, the last to end last."""
    printed, reports = run_script(EXAMPLES / f"{name}.py", folder, "--ssd", str(scratch), *options, **settings)
    assert "paging: peak" in printed
    return printed, reports


def run_script(script: Path, folder: Path, *options: str, **settings: Any) -> tuple[str, list[Any]]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_OFFLOAD_CONFIG": json.dumps({"report": str(folder / "reports"), **settings}),
    }
    command = [sys.executable, str(script), *options]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-5000:]
    files = sorted((folder / "reports").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return ended.stdout, [json.loads(file.read_text()) for file in files]


def assert_paged(report: dict[str, Any], *, budget_bytes: int = BUDGET_BYTES, is_frozen: bool = False) -> None:
    assert report["budget_bytes"] == budget_bytes
    assert 0 < report["host_peak_bytes"] <= budget_bytes
    assert report["evictions"] > 0
    assert report["ssd_read_bytes"] > budget_bytes
    assert (report["ssd_written_bytes"] == 0) is is_frozen, "pages of frozen weights stay in the checkpoint"


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_training(tmp_path, scratch, name):
    """All weights are trained and saved."""
    printed, (report,) = run_example(name, tmp_path, scratch, "--out", "tuned")
    assert "3 steps" in printed
    assert_paged(report)
    assert report["written_bytes"]["state"] > 0
    base = load_file(tmp_path / ".cache" / "tiny-llama" / "model.safetensors")
    tuned = load_file(tmp_path / "tuned" / "model.safetensors")
    assert tuned.keys() == base.keys()
    assert [name for name, weight in tuned.items() if weight.equal(base[name])] == []


def test_lora(tmp_path, scratch):
    """The adapter is saved. The frozen base is written at most once, as it first leaves memory."""
    _, (report,) = run_example("lora", tmp_path, scratch, "--out", "adapter")
    assert_paged(report)
    base_bytes = (tmp_path / ".cache" / "tiny-llama" / "model.safetensors").stat().st_size
    assert report["written_bytes"]["parameter"] < 1.1 * base_bytes
    assert report["clean_drops"] > 0
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(weight.count_nonzero() for name, weight in adapter.items() if "lora_B" in name)  # which begins with 0


def test_generate(tmp_path, scratch):
    printed, (report,) = run_example("generate", tmp_path, scratch, "--tokens", "8", "--ram", "12MiB")
    assert "generate: 8 tokens in" in printed
    assert_paged(report, budget_bytes=12 << 20, is_frozen=True)


def test_without_a_module(tmp_path, scratch):
    """The same losses as with room for everything, where a third of what is saved has room."""
    printed, (report,) = run_example("without_a_module", tmp_path, scratch)
    assert_paged(report)
    assert report["written_bytes"]["activation"] == report["ssd_written_bytes"]
    (tmp_path / "roomy").mkdir()
    roomy, (beside,) = run_example("without_a_module", tmp_path / "roomy", scratch, "--ram", "1GiB")
    assert beside["ssd_written_bytes"] == 0
    assert printed.splitlines()[0] == roomy.splitlines()[0]


def test_compressed_moe(tmp_path, scratch):
    """Compressing pages, the folder verifies, and generating and training from it page as well.

    Tiny experts are a few sectors each, so everything is paged here.
    """
    options = ["--out", "coded", "--rows", "16", "--tokens", "32", "--ram", "10MiB"]
    printed, (compressed, used) = run_example("compressed_moe", tmp_path, scratch, *options, min_paged_bytes=0)
    assert "0 problems" not in printed
    assert "12 blobs" in printed
    assert "no damage found" in printed
    assert "generate: " in printed
    assert "adapter: 3 steps" in printed
    saved = load_file(tmp_path / ".cache" / "tiny-experts" / "model.safetensors")
    weights = sum(weight.numel() for name, weight in saved.items() if ".experts." in name)
    blob_bytes = sum(file.stat().st_size for file in (tmp_path / "coded").glob("experts-*.safetensors"))
    assert 0.5 * weights < 8 * blob_bytes < 0.8 * weights  # of 0.8 bits per weight; small experts have large scales
    bits = re.search(r"([\d.]+) bits per weight", printed)
    assert bits is not None
    assert 0.75 < float(bits[1]) <= 0.8
    assert_paged(compressed, budget_bytes=10 << 20)
    assert_paged(used, budget_bytes=10 << 20)


def test_each_example_is_short_and_tested():
    scripts = {path.stem: path for path in EXAMPLES.glob("*.py") if not path.stem.startswith("demo")}
    assert scripts.keys() == ALL | HELPERS
    assert {name for name in ALL if len(scripts[name].read_text().splitlines()) > MAX_LINES} == set()


SAMPLES = {"README.md": "out/model.safetensors", "docs/guides/lora.md": "adapter/adapter_model.safetensors"}
SAMPLE_DATA = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
from example_run import training_rows
from tiny_model import save_model
from transformers import AutoTokenizer
save_model(Path("tiny"))
dataset = training_rows(AutoTokenizer.from_pretrained("tiny"), rows=3, tokens=64)
"""


@pytest.mark.parametrize("document", SAMPLES)
def test_the_first_sample_of_a_document_runs(tmp_path, scratch, document):
    """Method: as it is written, with another model, budget and directory."""
    sample = re.search(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert sample is not None
    script = SAMPLE_DATA + sample[1]
    for written, value in {"path/to/model": "tiny", "8GiB": str(BUDGET_BYTES // 2), "/mnt/nvme": str(scratch)}.items():
        assert written in script
        script = script.replace(written, value)
    (tmp_path / "sample.py").write_text(script)
    _, (report,) = run_script(tmp_path / "sample.py", tmp_path)
    assert_paged(report, budget_bytes=BUDGET_BYTES // 2)
    assert load_file(tmp_path / SAMPLES[document])


@pytest.fixture
def progress_class(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo_progress").Progress


def test_the_demo_says_what_it_does_without_a_terminal(progress_class):
    """Method: an activity that ends only when a second line came, so that silence is a timeout."""
    lines = LineQueue()
    with progress_class("paged", console=Console(file=lines, force_terminal=False), interval_seconds=0.01) as progress:
        assert re.fullmatch(r"paged: starting, \d+ s\n", lines.get())
        progress.show("step 2 of 20")
        while "step 2 of 20" not in lines.get():
            pass
    assert re.fullmatch(r"paged: done after \d+ s\n", lines.last())


def test_the_demo_redraws_one_line_on_a_terminal(progress_class):
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress_class("paged", console=console) as progress:
        progress.show("step 2 of 20")
    assert "paged: done after" in console.file.getvalue()
    assert "\r" in console.file.getvalue()


class LineQueue(io.TextIOBase):
    """A file whose lines can be waited for."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> int:
        if text.strip():
            self._lines.put(text)
        return len(text)

    def get(self) -> str:
        return self._lines.get(timeout=60)

    def last(self) -> str:
        found = [self.get()]
        while not self._lines.empty():
            found.append(self.get())
        return found[-1]
