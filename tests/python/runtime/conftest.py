"""What several tests of this folder take."""

from pathlib import Path

import pytest
from support.fake_gpu import build


def pytest_itemcollected(item: pytest.Item) -> None:
    """A torch with CUDA, as the newer one has, registers its own hooks and kernels where the fake has its own."""
    if "fake_gpu" in getattr(item, "fixturenames", ()):
        item.add_marker("any_torch")


@pytest.fixture(scope="session")
def fake_gpu() -> Path:
    """The library that makes a GPU."""
    return build()
