"""Builds the benchmark programs of the torch-free layers."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "benchmarks"


def build(target: str) -> Path:
    """Build a program where it is out of date; return its path."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DOFFLOAD_TEST_LAYERS="]
    for command in (configure, ["cmake", "--build", str(BUILD), "--target", target]):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}")
    return BUILD / "benchmarks" / "native" / target
