"""A store of pages for the ranks of a benchmark: the command, at a free port of this machine."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.worker_process import WorkerFailed

END_SECONDS = 60


class ServedStore:
    """A running store.

    Args:
        process: Its, whose standard output and error are pipes.
        address: Where it listens.
    """

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def end(self) -> dict[str, Any]:
        """Interrupt it, and return what it says that it did.

        Raises:
            WorkerFailed: If it ends with an error.
        """
        self._process.terminate()
        output, said = self._process.communicate(timeout=END_SECONDS)
        if self._process.returncode != 0:
            raise WorkerFailed(f"the store ended with {self._process.returncode}: {said}")
        return json.loads(output)


@contextmanager
def store_process(folder: str, budget_bytes: int) -> Iterator[ServedStore]:
    """Start one with so much memory, whose scratch file is in the folder."""
    command = [sys.executable, "-m", "torch_offload", "store", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(
        [*command, "--ram", str(budget_bytes), "--ssd", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.stderr.readline() if process.stderr else ""
        found = re.match(r"store at (\S+): ", said)
        if found is None:
            raise WorkerFailed(f"the store did not start: {said}")
        yield ServedStore(process, found[1])
    finally:
        process.kill()
        process.wait()
