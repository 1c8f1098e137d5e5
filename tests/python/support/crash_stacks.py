"""Hooks of pytest: a test that hangs ends its process, and its failure shows where each thread stood.

Where several tests run at once, what a worker prints as it ends is far from the failure that names it.
"""

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

SECONDS = 400
"""The longest test takes 70 s where nothing else runs."""
FOLDER = "OFFLOAD_TEST_STACKS"

stacks = pytest.StashKey[IO[str]]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each worker a file for its stacks, after pytest has chosen where errors go; otherwise they are printed."""
    if hasattr(config, "workerinput"):
        path = Path(os.environ[FOLDER]) / config.workerinput["workerid"]
        config.stash[stacks] = path.open("w")
        faulthandler.enable(config.stash[stacks])
    else:
        os.environ[FOLDER] = tempfile.mkdtemp()
        config.stash[stacks] = os.fdopen(os.dup(sys.stderr.fileno()), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process goes on without the file."""
    if hasattr(config, "workerinput"):
        faulthandler.disable()
    else:
        shutil.rmtree(os.environ.pop(FOLDER))
    config.stash[stacks].close()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process whose test hangs."""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=item.config.stash[stacks])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> None:
    """Add what the worker that ended has written."""
    path = Path(os.environ[FOLDER]) / report.node.gateway.id  # type: ignore[attr-defined]
    report.sections.append(("stacks", path.read_text()))
