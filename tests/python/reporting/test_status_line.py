"""The line at the foot of the terminal: what it says, that it garbles nothing, that nobody sees it elsewhere."""

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from fcntl import ioctl

import pytest
from support.figures import device_statistics, statistics

from torch_offload.reporting import status_line
from torch_offload.reporting.timeline import Sample

pytestmark = [pytest.mark.alone, pytest.mark.any_torch]

# One painting, the set-up before the first one, and the giving back of the row.
PAINTED = re.compile(rb"\x1b7\x1b\[\d+;1H\x1b\[2K(.*?)\x1b8", re.DOTALL)
SET_UP = re.compile(rb"\n\x1b7\x1b\[1;\d+r\x1b8\x1b\[1A")
STYLE = re.compile(rb"\x1b\[[\d;]*m")

RUN = """
    import sys, time, torch, torch_offload
    from torch_offload.reporting import status_line
    from tqdm import tqdm
    live = sys.argv[2] != "plain"
    painted = []
    tick = status_line.StatusLine.tick
    status_line.PERIOD_SECONDS = 0.01
    status_line.StatusLine.tick = lambda line: (tick(line), painted.append(line))

    def wait_for_paintings():
        seen, end = len(painted), time.monotonic() + (60 if sys.argv[2] == "live" else 0.03)
        while len(painted) < seen + 2 and time.monotonic() < end:
            time.sleep(0.001)

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    config = torch_offload.Config(ram="1MiB", ssd=sys.argv[1], min_paged_bytes=0, page_elements=4096, status_line=live)
    print("before")
    torch_offload.wrap(model, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in tqdm(range(6), mininterval=0, miniters=1, bar_format="{n}/{total}", ncols=40):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        wait_for_paintings()
        if step == 3:
            tqdm.write("a line of the log", file=sys.stderr)
    print("after", flush=True)
    {end}
"""


def run_on_a_terminal(*arguments, end="", rows=24, columns=100, term="xterm"):
    """Return everything that was written to the terminal, and the exit status."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = term
        ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        script = textwrap.dedent(RUN.replace("{end}", end))
        os.execv(sys.executable, [sys.executable, "-c", script, *arguments])
    written = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            break
        if not chunk:
            break
        written += chunk
    os.close(terminal)
    return written.replace(b"\r\n", b"\n"), os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def without_line(written):
    return PAINTED.sub(b"", SET_UP.sub(b"", written))


def test_everything_else_is_written_as_without_the_line(scratch):
    """Method: a run with progress bar, log and prints on a terminal; what is left without our sequences is the same."""
    plain, status = run_on_a_terminal(str(scratch), "plain")
    assert status == 0
    assert b"a line of the log" in plain
    assert b"\x1b7" not in plain
    live, status = run_on_a_terminal(str(scratch), "live")
    assert status == 0
    painted = [STYLE.sub(b"", text).decode() for text in PAINTED.findall(live)]
    assert len(painted) >= 6  # each step waited for two
    assert without_line(live) == plain
    shown = [text for text in painted if "step/s" in text]
    assert shown
    assert all(re.search(r"r/w \d+\.\d\d/\d+\.\d\d GB/s │ stall \d+%", text) for text in shown)
    assert all(len(text) < 100 for text in painted)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("sys.exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("raise RuntimeError", 1),
        ("import signal; signal.raise_signal(2)", -signal.SIGINT),
    ],
)
def test_the_terminal_is_given_back_at_the_end(scratch, end, expected):
    """Method: the last thing our sequences do is to clear the row and to let all of the terminal scroll."""
    written, status = run_on_a_terminal(str(scratch), "live", end=end)
    assert status == expected
    assert PAINTED.findall(written)[-1] == b"\x1b[r"


def test_a_small_or_dumb_terminal_gets_nothing(scratch):
    for options in ({"rows": 3}, {"term": "dumb"}):
        written, status = run_on_a_terminal(str(scratch), "unseen", **options)
        assert status == 0
        assert not PAINTED.findall(written)


def test_where_stderr_is_no_terminal_nothing_is_written(scratch):
    script = textwrap.dedent(
        RUN.replace("{end}", "assert torch_offload.runtime.process.PROCESS.monitors.recorder is None")
    )
    script = script.replace('tqdm(range(6), mininterval=0, miniters=1, bar_format="{n}/{total}", ncols=40)', "range(6)")
    script = script.replace("tqdm.write", "(lambda *a, **k: None)")
    command = [sys.executable, "-c", script, str(scratch), "unseen"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "before\nafter\n", "")


def sample(seconds, *, steps, tokens=0, read=0, stalls=None, is_step_end=True):
    content = statistics(read=read, stalls=stalls, used=2**30)
    return Sample.from_statistics(content, seconds=seconds, steps=steps, tokens=tokens, is_step_end=is_step_end)


def test_the_figures():
    stalls = [{"read": 0.0, "memory": 0.0}, {"read": 0.5, "memory": 2.5}]
    samples = [
        sample(0.0, steps=1, stalls=stalls[0]),
        sample(5.0, steps=2, tokens=1000, read=2 * 10**9, stalls=stalls[1]),
        sample(8.0, steps=2, tokens=1000, read=2 * 10**9, stalls=stalls[1], is_step_end=False),
        sample(10.0, steps=2, tokens=1000, read=8 * 10**9, stalls=stalls[1], is_step_end=False),
    ]
    assert status_line.parts_of(samples, budget_bytes=3 * 2**30) == [
        "0.2 step/s",
        "200 token/s",
        "r/w 3.00/0.00 GB/s",
        "stall 30% (memory)",
        "memory 1.0/3.0 GiB",
    ]
    assert status_line.parts_of(samples[:1], budget_bytes=2**30)[0] == "first steps"
    small = [sample(0.0, steps=1)]
    assert status_line.parts_of(small, budget_bytes=2**29)[-1] == "memory 1024/512 MiB"
    slow = [sample(0.0, steps=1), sample(40.0, steps=2)]
    assert status_line.parts_of(slow, budget_bytes=2**30)[0] == "40.0 s/step"


def test_a_device_is_shown_before_memory():
    """What went over the link lately, each way, and what of the device is in use."""
    samples = [
        Sample.from_statistics(
            statistics(used=2**30) | {"device": device_statistics(to_device=moved, to_host=moved // 4, used=2**29)},
            seconds=seconds,
            steps=1,
            tokens=0,
            is_step_end=False,
        )
        for seconds, moved in ((0.0, 0), (2.0, 8 * 10**9))
    ]
    assert status_line.parts_of(samples, budget_bytes=3 * 2**30, device_budget_bytes=2**30)[-3:] == [
        "to/from device 4.00/1.00 GB/s",
        "device 0.5/1.0 GiB",
        "memory 1.0/3.0 GiB",
    ]


@pytest.mark.parametrize("width", [200, 80, 45, 30, 10, 1])
def test_the_line_never_wraps(width):
    parts = ["0.2 step/s", "r/w 3.00/0.00 GB/s", "stall 30% (memory)"]
    text = STYLE.sub(b"", status_line.rendered(parts, width=width).encode()).decode()
    assert len(text) <= width
    assert "\n" not in text
    assert ("stall" in text) == (width >= 80)
    assert ("step/s" in text) == (width >= 30)
