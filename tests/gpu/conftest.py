"""Tests that need a GPU. Without one they fail: `make gpu-test` is never passed by not running."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))  # the support package


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a GPU: torch.cuda.is_available() is False", returncode=1)
    from torch_offload import _C

    if not _C.built_with_cuda:
        pytest.exit("tests/gpu needs the CUDA build: make gpu-test, or FORCE_CUDA=1 pip install ...", returncode=1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
