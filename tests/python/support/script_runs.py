"""Runs scripts as a user does, offline, plain or under the launcher, and returns what they left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parents[1]
SITE = TESTS / "support" / "site"
SCRIPTS = TESTS / "support" / "scripts"
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Ended:
    """A process that has ended, and the reports of the engines of its process tree."""

    status: int
    output: str
    errors: str
    reports: list[dict[str, Any]]

    @property
    def report(self) -> dict[str, Any]:
        """The one report: one process of the tree paged."""
        assert len(self.reports) == 1, f"{len(self.reports)} processes paged\n{self.errors[-3000:]}"
        return self.reports[0]


class Running:
    """A command in a process of its own."""

    def __init__(self, command: Sequence[str], gpu: Path | None) -> None:
        self.reports = tempfile.mkdtemp()
        paths = [str(ROOT), str(TESTS), str(SITE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "REPORT_DIRECTORY": self.reports,
            **({"CUDA_VISIBLE_DEVICES": ""} if gpu is None else {"FAKE_GPU": str(gpu)}),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.process = subprocess.Popen(
            list(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> Ended:
        try:
            output, errors = self.process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        reports = [json.loads(path.read_text()) for path in sorted(Path(self.reports).iterdir())]
        return Ended(self.process.returncode, output, errors, reports)


def start(command: Sequence[str], *, gpu: Path | None = None) -> Running:
    """Start a Python script, or a module after -m, as Python runs it; with the library of a fake GPU, on that."""
    return Running([sys.executable, *command], gpu)


def start_paged(
    command: Sequence[str], *, ram: str, ssd: Path, update: str = "step", gpu: Path | None = None
) -> Running:
    """Start the same under the launcher. A GPU has as much memory for pages as the host."""
    settings = ["--ram", ram, "--ssd", str(ssd), "--update", update]
    settings += [] if gpu is None else ["--gpu", str(int(ram) * 4 // 3)]  # a quarter is torch's own
    return Running([sys.executable, "-m", "support.launch", *settings, *command], gpu)


def assert_paged(ended: Ended) -> None:
    assert_report_paged(ended.report)


def assert_paged_on_gpu(ended: Ended) -> None:
    """Pages crossed the link both ways, and nothing was used without a pin: that is a fault, or an error."""
    report, device = ended.report, ended.report["device"]
    assert report["faults"] == 0
    assert device["peak_bytes"] <= device["budget_bytes"]
    assert device["to_device_bytes"]["parameter"] > 0
    assert sum(device["to_host_bytes"].values()) > 0


def assert_report_paged(report: dict[str, Any]) -> None:
    assert report["evictions"] > 0
    assert report["ssd_written_bytes"] > 0
    assert report["ssd_read_bytes"] > 0
    assert report["host_peak_bytes"] <= report["budget_bytes"]


def assert_same_files(found: Path, expected: Path, pattern: str) -> list[Path]:
    """Compare the files of two folders byte for byte, and return their names."""
    names = sorted(path.relative_to(expected) for path in expected.rglob(pattern))
    assert names, f"nothing was saved in {expected}"
    assert sorted(path.relative_to(found) for path in found.rglob(pattern)) == names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    return names


def logged(folder: Path) -> list[dict[str, float]]:
    """Return losses and norms of four steps of a Trainer that saved there."""
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    return [{name: entry[name] for name in ("loss", "grad_norm")} for entry in state["log_history"] if "loss" in entry]
