"""Builds the benchmark programs of the torch-free layers."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path("build", "benchmarks")


def build(target: str, root: Path = ROOT) -> Path:
    """Build a program of this tree, or of another, where it is out of date; return its path."""
    folder = root / BUILD
    configure = ["cmake", "-S", str(root), "-B", str(folder), "-G", "Ninja", "-DOFFLOAD_TEST_LAYERS="]
    for command in (configure, ["cmake", "--build", str(folder), "--target", target]):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}")
    return folder / "benchmarks" / "native" / target
