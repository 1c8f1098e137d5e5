"""The tests that need a GPU can at least be imported and collected without one, so that a renamed helper is seen."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parents[2]
# Says that there is a GPU and a CUDA build, which is all that the start of tests/gpu asks for.
COLLECT = """
import sys, types, pytest, torch, torch_offload
torch.cuda.is_available = lambda: True
real = torch_offload._C
pretended = types.SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if not name.startswith("__")})
pretended.built_with_cuda = True
torch_offload._C = pretended
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests/gpu"]))
"""


def test_they_are_collected():
    """Every file has tests, and none fails to be imported."""
    ended = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    collected = {line.split(":")[0]: int(line.split(": ")[1]) for line in ended.stdout.splitlines() if ": " in line}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {path for path, count in collected.items() if count > 0} == expected, ended.stdout
