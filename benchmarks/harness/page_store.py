"""A store of pages for the ranks of a benchmark or a test: the command, at a free port of this machine."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.worker_process import WorkerFailed

END_SECONDS = 60


@dataclass
class StoreProcess:
    """A running store.

    Attributes:
        process: Its, whose standard output and error are pipes.
        address: Where it listens.
    """

    process: subprocess.Popen[str]
    address: str

    def end(self) -> dict[str, Any]:
        """Interrupt it, and return what it says that it did.

        Raises:
            WorkerFailed: If it ends with an error.
        """
        self.process.terminate()
        output, said = self.process.communicate(timeout=END_SECONDS)
        if self.process.returncode != 0:
            raise WorkerFailed(f"the store ended with {self.process.returncode}: {said}")
        return json.loads(output)


@contextmanager
def store_process(folder: str, *options: str, ram: str, **environment: str) -> Iterator[StoreProcess]:
    """Start one with so much memory, whose scratch file is in the folder, and further options of the command."""
    command = [sys.executable, "-m", "torch_offload", "store", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(
        [*command, "--ram", ram, "--ssd", folder, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        said = process.stderr.readline() if process.stderr else ""
        found = re.match(r"store at (\S+): ", said)
        if found is None:
            raise WorkerFailed(f"the store did not start: {said}")
        yield StoreProcess(process, found[1])
    finally:
        process.kill()
        process.wait()
