"""DeepSpeed in an environment of its own, and what can be set."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.reporting import progress

VERSION = "0.19.8"
HEADER = Path("/usr/include/libaio.h")
START = {
    "pipelined": False,
    "optimizer_buffers": 5,
    "parameter_buffers": 5,
    "sub_group_elements": 10_000_000,
    "block_bytes": 1 << 20,
    "queue_depth": 16,
    "io_threads": 1,
}
# deepspeed_search.py tries them one after the other on top of the best so far; a change is kept if it is faster.
CHANGES: list[dict[str, Any]] = [
    {"pipelined": True, "optimizer_buffers": 12},
    {"pipelined": True, "optimizer_buffers": 20},
    {"optimizer_buffers": 8},
    {"block_bytes": 8 << 20, "queue_depth": 32},
    {"io_threads": 2},
    {"sub_group_elements": 30_000_000},
    {"sub_group_elements": 100_000_000},
    {"parameter_buffers": 12},
]


def ensure(venv: Path) -> Path:
    """Return the interpreter of an environment with DeepSpeed and the torch and transformers of this one."""
    python = venv / "bin" / "python"
    if python.exists():
        probe = subprocess.run([str(python), "-c", "import deepspeed"], capture_output=True, check=False)
        if probe.returncode == 0:
            return python
    if not HEADER.exists():
        raise SystemExit("DeepSpeed's NVMe offload needs libaio: apt-get install libaio-dev")
    here = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers", "accelerate", "numpy")]
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", str(venv)],
        [*pip, *here, "ninja", "setuptools", "wheel"],
        [*pip, "--no-build-isolation", f"deepspeed=={VERSION}"],
    ):
        progress(" ".join(command))
        settings = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
        if ended.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}")
    return python


def as_option(settings: dict[str, Any]) -> str:
    return json.dumps(settings)


def from_option(text: str) -> dict[str, Any]:
    """Read settings from JSON; what is left out is as at the start of the search."""
    given = json.loads(text)
    if unknown := set(given) - set(START):
        raise SystemExit(f"unknown settings of DeepSpeed {sorted(unknown)}; there are {', '.join(START)}")
    return {**START, **given}


def environment(venv: Path) -> dict[str, str]:
    """Return what its workers need. Its operators are built once, on first use, into the environment."""
    extensions = venv / "torch-extensions"
    for lock in extensions.glob("*/lock"):
        lock.unlink()  # of a build that was killed; the next one would wait for it for ever
    threads = str(os.cpu_count() or 1)
    return {"TORCH_EXTENSIONS_DIR": str(extensions), "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
