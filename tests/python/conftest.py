"""What every test file may ask for. Each test starts and ends without an engine."""

import collections
import datetime
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from support.crash_stacks import (  # noqa: F401 (hooks)
    pytest_configure,
    pytest_handlecrashitem,
    pytest_runtest_protocol,
    pytest_unconfigure,
)
from support.fake_gpu import build

from torch_offload import Config
from torch_offload.runtime.process import PROCESS
from torch_offload.system import resources

ROOT = Path(__file__).resolve().parents[2]
# What a machine with everything installed may still lack. Any other skipped test fails where REQUIRE_ALL=1.
EXPECTED_SKIPS = ("this extension was built without CUDA", "this CPU does not flush denormals")

IS_CI = os.environ.get("REQUIRE_ALL") == "1"

# Time is no criterion where cores are shared. In continuous integration examples are drawn from the seed of the day, so
# that a failure there can be had again; elsewhere they are drawn anew, and a failure prints how to have it again.
SEED = int(os.environ.get("HYPOTHESIS_SEED") or datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d"))
hypothesis.settings.register_profile("project", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")
if IS_CI and hypothesis.core.global_force_seed is None:
    hypothesis.core.global_force_seed = SEED

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for what a shell runs in the background: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROTATING_PARTS = 3
MOST_NEWER_PARTS = 10
SEED_OF_PARTS = int(os.environ.get("OFFLOAD_TEST_SEED") or "0", 16)
RUNS_ALL_PARTS = os.environ.get("MATRIX") == "full" or not os.environ.get("OFFLOAD_TEST_SEED")
IS_NEWER_TORCH = os.environ.get("NEWER_TORCH") == "1"


def pytest_itemcollected(item: pytest.Item) -> None:
    """A torch with CUDA, as the newer one has, registers its own hooks and kernels where the fake has its own."""
    if "fake_gpu" in getattr(item, "fixturenames", ()):
        item.add_marker("any_torch")


def rotating_set(item: pytest.Item) -> tuple[object, ...]:
    """Return what the cases have in common of which a third runs: their test, or their file where its mark says so."""
    mark = item.get_closest_marker("rotating")
    if mark is not None and mark.kwargs.get("among") == "file":
        return (item.path,)
    return item.path, getattr(item, "originalname", item.name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave two thirds of each rotating test to other commits, or what its mark says (`parts`); MATRIX=full, or no
    seed, runs all of it.

    On the newer torch every test of three cases or more rotates, so that a tenth of them runs, one at least: what it
    shows was shown on the usual one.
    """
    if RUNS_ALL_PARTS:
        return
    sizes = collections.Counter(map(rotating_set, items))
    numbers: collections.Counter[object] = collections.Counter()
    kept, left = [], []
    for item in items:
        cases = rotating_set(item)
        mark = item.get_closest_marker("rotating")
        is_rotating = sizes[cases] >= ROTATING_PARTS and (mark is not None or IS_NEWER_TORCH)
        parts = ROTATING_PARTS if mark is None else mark.kwargs.get("parts", ROTATING_PARTS)
        parts = min(sizes[cases], MOST_NEWER_PARTS) if IS_NEWER_TORCH else parts
        (left if is_rotating and (numbers[cases] - SEED_OF_PARTS) % parts != 0 else kept).append(item)
        numbers[cases] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name seeds, also of a run that succeeds."""
    if IS_CI:
        terminalreporter.write_line(f"examples of hypothesis: HYPOTHESIS_SEED={SEED}")
    if not RUNS_ALL_PARTS:
        parts = "a tenth" if IS_NEWER_TORCH else "a third or less"
        seed = f"OFFLOAD_TEST_SEED={os.environ['OFFLOAD_TEST_SEED']}"
        terminalreporter.write_line(f"{parts} of the cases of rotating tests, by {seed}; MATRIX=full: all")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what is skipped in continuous integration, where everything that a test needs is to be installed."""
    report = yield
    if report.skipped and IS_CI:
        *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
        if not reason.removeprefix("Skipped: ").startswith(EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped although REQUIRE_ALL=1 is set: {reason}"
    return report


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_searched() -> None:
    """What is there before a file's tests is never garbage: a search of all that torch and transformers are takes
    0.2 s, more than most tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_engine_left() -> Iterator[None]:
    """An engine belongs to one test; its replacements are gone afterwards."""
    torch.manual_seed(0)
    yield
    PROCESS.close_session()
    gc.collect()
    assert "numpy" not in vars(torch.Tensor)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For many small operators: beside another worker their threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory on a real disk."""
    if resources.scratch_refusal(tmp_path) is None:
        yield tmp_path
        return
    parent = ROOT / "build" / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=parent))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def fake_gpu() -> Path:
    """The library that makes a GPU."""
    return build()


@pytest.fixture
def config(scratch: Path) -> Config:
    """Pages of 4,096 elements, nothing too small to be paged, room for the tiny models."""
    return Config(ram="8MiB", ssd=scratch, min_paged_bytes=0, page_elements=4096)
