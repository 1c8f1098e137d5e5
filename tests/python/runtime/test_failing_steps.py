"""A step on a disk that begins to fail in its middle ends before the step, after it, or is marked; never in between.

Method: `support.failing_steps` in a process of its own, for some transfers of the step, others for each commit. All of
them: `python -m support.failing_steps`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
EVERY = 31


@pytest.fixture(scope="session")
def failing_disk(tmp_path_factory) -> Path:
    """The library that stands before the C library."""
    library = tmp_path_factory.mktemp("failing_disk") / "failing_disk.so"
    source = SUPPORT / "failing_disk.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "single", "adafactor"])
def test_a_step_is_whole_or_marked(optimizer, failing_disk, scratch):
    """Updates that are recorded are never left half-way; the others are refused to be saved if they are."""
    first = 1 + int(os.environ.get("OFFLOAD_TEST_SEED") or "0", 16) % EVERY
    command = [sys.executable, "-m", "support.failing_steps", optimizer, scratch, str(EVERY), str(first)]
    paths = [str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "LD_PRELOAD": str(failing_disk), "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert sum(found.get(outcome, 0) for outcome in ("before", "after", "refused")) >= 3
    if optimizer == "fused":
        assert found.get("refused", 0) == 0
    else:
        assert found["refused"] > 0
