"""What the watchdog tells: once where nothing moves, at once where somebody asks, and nothing else."""

import _thread
import io
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from support.no_threads import refuse_thread
from support.paging import has_thread_in, wait_until
from support.small_module import TIGHT, adamw, make_module, snapshot, step
from torch import nn

import torch_offload
from torch_offload import Config
from torch_offload.errors import OffloadError
from torch_offload.runtime import surroundings, watchdog
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.watchdog import Limits, Watchdog
from torch_offload.system import dump_socket, stacks

pytestmark = pytest.mark.any_torch

HUNG = {"ssd_rate": 10}
SETTINGS = {"ram": "8MiB", "min_paged_bytes": 0, "page_elements": 4096}
WAIT = {"cause": "read", "thread_id": 7, "thread_name": "python", "seconds": 60.0, "page": "page 3 of weight"}
STEPS = 12
SCRIPT = """
    import sys
    sys.path.insert(0, {support!r})
    from support.small_module import adamw, make_module, snapshot, step

    module = make_module()
    optimizer = adamw(module)
    for number in range({steps}):
        step(module, optimizer, seed=number)
        print(number, flush=True)
    sys.stdin.readline()
    print(snapshot(module, optimizer), flush=True)
"""
HANGING_SCRIPT = """
    import torch_offload
    from torch import nn

    module = torch_offload.wrap(nn.Linear(64, 64), config=torch_offload.Config(
        ssd={scratch!r}, **{settings!r}, emulation={hung!r}, watchdog=True))
    print("begin", flush=True)
    torch_offload.evict(module)
"""


class FakeEngine:
    """Counts what it is told to, and waits if it is told to."""

    def __init__(self) -> None:
        self.pins = 0
        self.waits: list[dict] = []

    def statistics(self) -> dict:
        return {"pins": self.pins, "faults": 0, "read_bytes": {"state": 0}, "written_bytes": {"state": 0}}

    def dump(self) -> dict:
        counts = dict.fromkeys(
            ("moving_pages", "late_pages", "memory_waiters", "program_waiters", "transients", "uses_in_flight"), 0
        )
        return {"host": {"pages": None, "memory": None, "waits": self.waits, "transfers": [], **counts}}


class FakeProgram:
    """A fake engine under a watchdog that looks once for each second that passes."""

    def __init__(self, *, step_seconds: float = 0, steps: int = 0) -> None:
        self.engine = FakeEngine()
        self.stream = io.StringIO()
        self.seconds = 0.0
        self.dog = Watchdog(self.engine, stream=self.stream, clock=lambda: self.seconds)
        for _ in range(steps):
            self.seconds += step_seconds
            self.dog._after_step(None, None, None)
            self.dog.look()

    def pass_time(self, seconds: int, *, pins: int = 0) -> int:
        """Return how often something was told by the end of it."""
        for _ in range(seconds):
            self.seconds += 1
            self.engine.pins += pins
            self.dog.look()
        return self.stream.getvalue().count("nothing has moved")


@pytest.fixture
def runtime_directory(monkeypatch):
    """A directory for sockets with a short name, which child processes get too."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def test_a_wait_that_lasts_is_told_once_and_again_after_ten_minutes():
    program = FakeProgram()
    program.engine.waits = [WAIT]
    assert program.pass_time(60) == 0
    assert program.pass_time(1) == 1
    assert program.pass_time(599) == 1
    assert program.pass_time(1) == 2
    text = program.stream.getvalue()
    assert "thread 7 (python) has waited 60.0 s for a read: page 3 of weight" in text
    assert "look" in text  # in the stacks
    assert "The engine:\nhost tier:" in text


def test_it_is_told_again_after_something_moved():
    program = FakeProgram()
    program.engine.waits = [WAIT]
    assert program.pass_time(61) == 1
    assert program.pass_time(1, pins=1) == 1
    assert program.pass_time(59) == 1
    assert program.pass_time(1) == 2


def test_a_program_that_has_not_begun_to_train_may_be_idle():
    """Neither nothing, nor one step (of a warm-up), nor a wait that has only begun."""
    program = FakeProgram(step_seconds=1, steps=1)
    program.engine.waits = [{**WAIT, "seconds": 0.5}]
    assert program.pass_time(3000) == 0


def test_a_program_that_uses_pages_is_left_alone():
    program = FakeProgram(step_seconds=1, steps=5)
    program.engine.waits = [WAIT]
    assert program.pass_time(3000, pins=1) == 0


def test_a_training_that_stands_still_without_a_wait_is_told():
    program = FakeProgram(step_seconds=1, steps=2)
    assert program.pass_time(59) == 0
    assert program.pass_time(1) == 1
    assert "no thread waits in the engine" in program.stream.getvalue()


def test_slow_steps_are_given_the_time_of_twenty():
    """Method: the median of steps of 30 seconds; one that took an hour does not count."""
    program = FakeProgram(step_seconds=30, steps=9)
    program.seconds += 3600
    program.dog._after_step(None, None, None)
    program.dog.look()
    assert statistics.median([30, 30, 3600]) == 30
    assert program.pass_time(599) == 0
    assert program.pass_time(1) == 1


def test_time_in_which_the_process_was_stopped_does_not_count():
    program = FakeProgram(step_seconds=1, steps=2)
    program.pass_time(1)
    program.seconds += 3600
    program.dog.look()
    assert program.stream.getvalue() == ""


def test_a_stream_that_is_gone_is_no_error():
    program = FakeProgram(step_seconds=1, steps=2)
    program.stream.close()
    for _ in range(100):
        program.seconds += 1
        program.dog.look()


def test_a_hung_disk_is_told_while_a_thread_waits_for_it(scratch, caplog, runtime_directory):
    """With the page, the transfer and the line of Python; the engine's log lines come without a call into it.

    Method: a disk on which a page takes longer than the test, and a watchdog that counts in milliseconds.
    """
    caplog.set_level(logging.WARNING, logger="torch_offload")
    module = torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch, io_timeout=4, emulation=HUNG))
    stream = io.StringIO()
    dog = Watchdog(PROCESS.session, limits=Limits(period_seconds=0.02, still_seconds=0.1), stream=stream)
    dog.start()
    raised = []

    def evict() -> None:
        try:
            torch_offload.evict(module.weight)
        except OffloadError as error:
            raised.append(error)

    waiting = threading.Thread(target=evict)
    waiting.start()
    wait_until(lambda: "The engine:" in stream.getvalue(), "the watchdog tells")
    wait_until(lambda: "the disk may hang" in caplog.text, "the log is delivered")
    dump = dog._everything(PROCESS.session.dump())
    waiting.join()
    dog.stop()
    assert raised
    text = stream.getvalue()
    assert text.count("nothing has moved") == 1
    assert "s for memory, or for a page to leave it: page 0 of weight. The disk may hang" in text
    assert "ssd tier: writing page 0 of weight (offset 0 of the scratch file" in text
    assert "test_watchdog.py" in text
    assert "1 evicting" in text
    warned = r"  last warnings: 1\n    \d\d:\d\d:\d\d ssd tier: writing page 0 of weight .*the disk may hang"
    assert re.search(warned, dump)
    assert dog._warnings not in logging.getLogger("torch_offload").handlers


def test_a_file_system_that_does_not_answer_holds_nothing_up(tmp_path):
    """It is asked once, until it answers; the others are asked each time."""
    answers, asked = threading.Event(), []

    def ask(directory: Path) -> int:
        asked.append(directory.name)
        if directory.name == "hung":
            answers.wait()
        return 3 << 20

    space = surroundings.FreeSpace([tmp_path / "hung", tmp_path / "good"], ask=ask)
    silent = f"  free in {tmp_path / 'hung'}: not known, the file system has not answered for a second"
    good = f"  free in {tmp_path / 'good'}: 3 MiB"
    assert [list(space.lines()), list(space.lines())] == [[silent, good]] * 2
    assert sorted(asked) == ["good", "good", "hung"]
    answers.set()
    wait_until(lambda: next(iter(space.lines())).endswith("hung: 3 MiB"), "it has answered")


def test_a_directory_that_is_gone_is_said(tmp_path):
    [line] = surroundings.FreeSpace([tmp_path / "gone"]).lines()
    assert line.startswith(f"  free in {tmp_path / 'gone'}: not known, [Errno 2]")


def test_the_last_warnings_are_kept():
    warnings = surroundings.RecentWarnings()
    warnings.install()
    for number in range(surroundings.KEPT_WARNINGS + 1):
        logging.getLogger("torch_offload.runtime").warning("number %d", number)
    warnings.remove()
    logging.getLogger("torch_offload").error("no more")
    first, *lines = warnings.lines()
    assert first == f"  last warnings: {surroundings.KEPT_WARNINGS}"
    assert [line.split(" ", 5)[-1] for line in lines] == [
        f"number {n}" for n in range(1, surroundings.KEPT_WARNINGS + 1)
    ]


def test_a_session_has_one_watchdog_and_leaves_nothing(scratch, runtime_directory):
    """The thread, the handler of SIGUSR1 and the socket are there while the session is."""

    module = torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch, watchdog=True))
    wait_until(lambda: has_thread_in(watchdog), "the thread had begun")
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert (runtime_directory / f"torch_offload-{os.getpid()}.sock").is_socket()
    torch_offload.unwrap(module)
    PROCESS.close_session()
    assert not has_thread_in(watchdog)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not stacks._is_handled()
    assert list(runtime_directory.iterdir()) == []


def test_nothing_is_there_unless_it_is_asked_for(scratch, runtime_directory):
    torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch))
    assert not has_thread_in(watchdog)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert list(runtime_directory.iterdir()) == []


def test_a_handler_of_the_program_stays(scratch, runtime_directory):
    """The session neither replaces it nor takes it away."""
    called = []
    signal.signal(signal.SIGUSR1, lambda *_: called.append(1))
    try:
        module = torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch, watchdog=True))
        signal.raise_signal(signal.SIGUSR1)
        assert called == [1]
        torch_offload.unwrap(module)
        PROCESS.close_session()
        signal.raise_signal(signal.SIGUSR1)
        assert called == [1, 1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_forked_child_lets_go_of_nothing(scratch, runtime_directory):
    torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch, watchdog=True))
    child = os.fork()
    if child == 0:
        PROCESS.monitors.end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "host tier:" in dump_socket.request(os.getpid())


def test_without_a_directory_for_the_socket_there_is_one_warning(scratch, caplog, monkeypatch, tmp_path):
    """Method: a name that is longer than a socket's may be."""
    long = tmp_path / ("d" * 120)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch, watchdog=True))
    assert [record.message for record in caplog.records if "dump" in record.message] == [
        "torch-offload dump will not reach this process: AF_UNIX path too long"
    ]
    assert list(long.iterdir()) == []


def test_training_goes_on_where_there_is_no_room_for_a_thread(scratch, caplog, monkeypatch, runtime_directory):
    """Nobody waits for a thread that has not begun, and nobody is sent to a socket that nothing listens to."""
    monkeypatch.setattr(_thread, "start_new_thread", refuse_thread)
    model = torch_offload.wrap(nn.Linear(64, 64), config=Config(**SETTINGS, ssd=scratch, watchdog=True))
    assert "no room for another thread: nothing watches this process or answers dumps" in caplog.text
    assert list(runtime_directory.iterdir()) == []
    model(torch.ones(2, 64)).sum().backward()
    PROCESS.close_session()


# --- A process that is asked ---------------------------------------------------------------------------------------


@pytest.fixture
def trained():
    """The state of the script's training, in memory."""
    module = make_module()
    optimizer = adamw(module)
    for number in range(STEPS):
        step(module, optimizer, seed=number)
    return snapshot(module, optimizer)


def start(tmp_path: Path, scratch: Path, *options: str) -> subprocess.Popen:
    """Start the script under the launcher and return once it trains. Its errors go to a file."""
    path = tmp_path / "script.py"
    support = str(Path(__file__).resolve().parents[1])
    path.write_text(textwrap.dedent(SCRIPT).format(support=support, steps=STEPS))
    settings = f"--ram {TIGHT} --ssd {scratch} --min-paged-bytes 0 --page-elements 4096".split()
    command = [sys.executable, "-m", "torch_offload", "run", *settings, *options, str(path)]
    with open(tmp_path / "errors", "w") as errors:
        running = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=errors, text=True)
    for line in running.stdout:
        if line == "2\n":
            return running
    pytest.fail((tmp_path / "errors").read_text())


def end(running: subprocess.Popen) -> str:
    """Let it end and return the last line of its output."""
    output, _ = running.communicate("\n", timeout=300)
    assert running.returncode == 0
    return output.splitlines()[-1]


def test_a_signal_shows_the_stacks_and_the_engine(tmp_path, scratch, runtime_directory, trained):
    """And training goes on with the same bits."""
    running = start(tmp_path, scratch)
    running.send_signal(signal.SIGUSR1)
    errors = tmp_path / "errors"
    wait_until(lambda: "host tier:" in errors.read_text(), "the engine is shown")
    assert end(running) == str(trained)
    text = errors.read_text()
    assert "Current thread" in text
    assert "script.py" in text
    assert f"torch_offload: SIGUSR1 asked process {running.pid} what it does.\nPython stacks of" in text
    assert "\nThe engine:\nhost tier:\n  memory: 576 KiB limit" in text
    assert re.search(
        rf"process:\n  memory mappings: [\d,]+ of [\d,]+\n  free in {scratch}: [\d.]+ \w+\n  last warn", text
    )


def test_both_answer_while_the_program_waits_for_the_disk(tmp_path, scratch, runtime_directory):
    """Method: the command until there is a wait, then the signal, which the engine's wait lets Python handle."""
    script = textwrap.dedent(HANGING_SCRIPT).format(scratch=str(scratch), settings=SETTINGS, hung=HUNG)
    errors = tmp_path / "errors"
    with open(errors, "w") as file:
        running = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=file, text=True)
    try:
        assert running.stdout.readline() == "begin\n", errors.read_text()
        waits = "s for memory, or for a page to leave it: page 0 of weight\n"
        wait_until(lambda: waits in f"{dump_socket.request(running.pid)}\n", "the command shows the wait")
        assert errors.read_text() == ""
        running.send_signal(signal.SIGUSR1)
        wait_until(lambda: waits in errors.read_text(), "the signal shows the wait")
        assert "Current thread" in errors.read_text()
    finally:
        running.kill()
        running.communicate()


def test_a_command_shows_the_stacks_and_the_engine(tmp_path, scratch, runtime_directory, trained):
    """Nothing of it is written by the process itself, which trains on with the same bits."""
    running = start(tmp_path, scratch)
    command = [sys.executable, "-m", "torch_offload", "dump", str(running.pid)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Python stacks of process {running.pid}:\n")
    assert "script.py" in shown.stdout
    assert "The engine:\nhost tier:\n  memory: 576 KiB limit" in shown.stdout
    assert end(running) == str(trained)
    assert (tmp_path / "errors").read_text() == ""
    assert list(runtime_directory.iterdir()) == []


def test_a_process_without_the_watchdog_is_told_apart(tmp_path, scratch, runtime_directory):
    running = start(tmp_path, scratch, "--no-watchdog")
    command = [sys.executable, "-m", "torch_offload", "dump", str(running.pid)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    end(running)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "does not listen" in shown.stderr
    assert "start it with torch-offload run" in shown.stderr
