"""What collectives do on pages whose pins end with the call, and not with the work: the benchmark of them is red.

Method: a library before all others that has the function by which the extension keeps such pins, empty. It takes its
arguments and leaves them to the caller, who lets the pins go.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from torch_offload import _C

DRIVER = Path(__file__).resolve().parents[3] / "benchmarks" / "distributed.py"
PATIENCE_SECONDS = 240
"""Some collectives wait for ever for what did not come."""


def symbol_of_hold() -> str:
    """Return the name by which the extension finds `CollectiveHolds::hold`."""
    listed = subprocess.run(["nm", "-D", "--defined-only", _C.__file__], capture_output=True, text=True, check=True)
    (symbol,) = {
        line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if "CollectiveHolds4hold" in line
    }
    return symbol


def library_without_it(folder: Path) -> Path:
    source, library = folder / "no_holds.c", folder / "no_holds.so"
    source.write_text(f"void {symbol_of_hold()}(void) {{}}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def run(scratch: Path, library: Path) -> tuple[str, str]:
    """Return what the driver prints, nothing if it does not end, and what it complains about."""
    command = [sys.executable, str(DRIVER), "--smoke", "--json", "--parts", "collectives", "--ssd", str(scratch)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes) as driver:
        try:
            return driver.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return "", "it does not end"
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)


def test_pins_that_end_with_the_call_are_seen(scratch, tmp_path):
    """A process that is ended, bytes that are wrong, or a wait without end."""
    printed, complained = run(scratch, library_without_it(tmp_path))
    if printed:
        assert not all(bar["holds"] for bar in json.loads(printed)["bars"])
    else:
        assert "WorkerFailed" in complained or "does not end" in complained
