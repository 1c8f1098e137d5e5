"""A disk that does not answer: who waits is told, and neither signals nor the end of the process wait for it.

The disk is emulated: a page takes it longer than any test runs. Times are reported, not judged.
"""

import errno
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.paging import wait_until
from torch import nn

import torch_offload
from torch_offload import Config
from torch_offload.errors import TierIOError

HUNG = {"ssd_rate": 10}
SCRIPT = """
    import signal, sys, torch, torch_offload
    from torch import nn

    {handlers}
    torch.manual_seed(0)
    module = torch_offload.wrap(nn.Linear(256, 256), config=torch_offload.Config(
        ram="8MiB", ssd=sys.argv[1], min_paged_bytes=0, page_elements=4096, emulation={hung!r}))
    print("begin", flush=True)
    try:
        torch_offload.evict(module)
    except torch_offload.OffloadError as error:
        sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
ENDS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
USES_THE_MODULE = "signal.signal(signal.SIGTERM, lambda *_: print(module.weight.sum()))"


def sleeps(process: subprocess.Popen) -> bool:
    """Whether the main thread has done nothing for a while."""
    schedule = Path(f"/proc/{process.pid}/schedstat")
    before = schedule.read_text()
    time.sleep(0.5)  # what is watched is that nothing happens; called again until it does not
    return schedule.read_text() == before


def start_hanging(tmp_path: Path, scratch: Path, *, handlers: str) -> subprocess.Popen:
    """Start a script and return once it waits for the disk."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(handlers=handlers, hung=HUNG))
    running = subprocess.Popen([sys.executable, path, scratch], stdout=-1, stderr=-1, text=True)
    assert running.stdout.readline() == "begin\n"
    wait_until(lambda: sleeps(running), "the script waits")
    return running


def test_a_transfer_that_does_not_end_is_a_typed_error(scratch):
    """Nothing is lost by it: what is in memory is computed with, bit for bit."""
    torch.manual_seed(0)
    expected = nn.Linear(256, 256)
    torch.manual_seed(0)
    settings = {"ram": "8MiB", "ssd": scratch, "min_paged_bytes": 0, "page_elements": 4096}
    module = torch_offload.wrap(nn.Linear(256, 256), config=Config(**settings, io_timeout=1, emulation=HUNG))
    with pytest.raises(TierIOError, match="the disk comes back") as raised:
        torch_offload.evict(module.weight)
    assert raised.value.errno == errno.ETIMEDOUT
    with pytest.raises(TierIOError, match=r"writing page . of weight .* has taken"):
        module(torch.ones(1, 256))
    assert same_bits(module.bias, expected.bias)


@pytest.mark.parametrize(
    ("number", "handlers", "status", "message"),
    [
        (signal.SIGINT, "", -signal.SIGINT, "KeyboardInterrupt"),
        (signal.SIGTERM, ENDS, 143, ""),
        (signal.SIGTERM, USES_THE_MODULE, 1, "OffloadError: the handler of a signal has to wait"),
    ],
    ids=["interrupt", "terminate", "handler that uses the module"],
)
def test_a_signal_ends_a_wait_for_the_disk(tmp_path, scratch, number, handlers, status, message):
    """And the process, although the disk never answers. Nothing stays in the directory."""
    running = start_hanging(tmp_path, scratch, handlers=handlers)
    running.send_signal(number)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == status, errors
    assert message in errors
    assert list(scratch.iterdir()) == [tmp_path / "script.py"]
