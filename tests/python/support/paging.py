"""Ways to page things out, to see what was fetched, and to compare paged with plain."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

import torch_offload
from support.bits import fingerprint

KINDS = ("parameter", "gradient", "state")
"""Kinds of pages that every training has."""


def assert_bitwise_equal(found: Any, expected: Any) -> None:
    """Every tensor in two nests has the same dtype, shape and bits, every other value the same text."""
    assert fingerprint(found) == fingerprint(expected)


def page_out(target: nn.Module | torch.Tensor) -> None:
    """Apply what is deferred and send all of it to SSD. The engine may read ahead again once it has seen a step."""
    torch_offload.flush()
    assert torch_offload.evict(target) == 0


def read_bytes() -> int:
    """Bytes read from SSD so far."""
    return torch_offload.report().ssd_read_bytes


def assert_an_update_was_recorded() -> None:
    """A step was written down, not run; the engine may apply it at any time before the next read."""
    assert torch_offload.report().counters["recorded_elements"] > 0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Give other threads the time they need. Fails after two minutes."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, f"two minutes passed before {what}"
        time.sleep(0.001)


def has_thread_in(module: ModuleType) -> bool:
    """True if a thread of Python other than this one runs code of the module."""
    ours = threading.get_ident()
    frames = [frame for ident, frame in sys._current_frames().items() if ident != ours]
    while frames:
        if any(frame.f_code.co_filename == module.__file__ for frame in frames):
            return True
        frames = [frame.f_back for frame in frames if frame.f_back is not None]
    return False


def assert_was_paged() -> None:
    """Pages left memory and were read again, and the budget held."""
    report = torch_offload.report()
    assert report.evictions > 0
    assert report.ssd_written_bytes > 0
    assert report.ssd_read_bytes > 0
    assert report.host_peak_bytes <= report.budget_bytes


@contextmanager
def reading_nothing() -> Iterator[None]:
    """Fails if the block fetches or faults."""
    before = torch_offload.report()
    yield
    after = torch_offload.report()
    assert (after.ssd_read_bytes, after.faults) == (before.ssd_read_bytes, before.faults)


@contextmanager
def reading(at_least_bytes: int) -> Iterator[None]:
    """Fails if the block fetches less: it did not touch what it should, or that was not away."""
    before = read_bytes()
    yield
    assert read_bytes() - before >= at_least_bytes
