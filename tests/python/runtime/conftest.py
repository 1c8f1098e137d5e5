"""What several tests of this folder take."""

from pathlib import Path

import pytest
from support.fake_gpu import build


@pytest.fixture(scope="session")
def fake_gpu() -> Path:
    """The library that makes a GPU."""
    return build()
