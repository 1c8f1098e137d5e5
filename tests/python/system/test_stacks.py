"""SIGUSR1 shows the Python stacks, as long as nobody else handles it, and is then as it was."""

import faulthandler
import signal
import subprocess
import sys
import threading
import time

import pytest

from torch_offload.system import stacks
from torch_offload.system.stacks import StackSignal, python_stacks

pytestmark = pytest.mark.any_torch

SIGNALS = 2000
BUSY_SCRIPT = """
import sys, threading
from torch_offload.system.stacks import StackSignal

def call(depth):
    return depth and call(depth - 1)

def call_on():
    while True:
        call(300)

def begin_and_end():
    while True:
        thread = threading.Thread(target=call, args=(100,))
        thread.start()
        thread.join()

asked = []
StackSignal(lambda: asked.append(1)).install()
for work in (call_on, call_on, begin_and_end):
    threading.Thread(target=work, daemon=True).start()
print("handled", flush=True)
sys.stdin.read()
print(len(asked))
"""


@pytest.fixture
def stderr(monkeypatch, tmp_path):
    """A file in place of stderr."""
    with open(tmp_path / "stderr", "w") as file:
        monkeypatch.setattr(stacks, "_stderr_file", lambda: file)  # pytest puts its own in place again and again
        yield tmp_path / "stderr"


def test_every_thread_is_shown_with_the_number_that_the_system_gives_it():
    text = python_stacks()
    main = threading.main_thread()
    assert f"0x{main.ident:016x} is thread {main.native_id} (MainThread)\n" in text
    assert f"Current thread 0x{main.ident:016x}" in text
    assert "in test_every_thread_is_shown" in text


def test_each_signal_shows_the_stacks_and_asks(stderr):
    """Also where the signal was handled and put back before."""
    for _ in range(2):
        asked = []
        before = len(stderr.read_text())
        handled = StackSignal(lambda asked=asked: asked.append(1))
        handled.install()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert handled.remove()
        assert asked == [1, 1]
        assert stderr.read_text()[before:].count("in test_each_signal_shows") == 2
        assert not stacks._is_handled()


def test_threads_that_run_meanwhile_do_no_harm():
    """Method: threads that call deep and end, a main thread that waits, and signals as fast as they are handled.

    With the stacks of all threads from the handler the process dies by SIGSEGV within some hundred signals.
    """
    command = [sys.executable, "-c", BUSY_SCRIPT]
    running = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True)
    assert running.stdout.readline() == "handled\n"
    for _ in range(SIGNALS):
        running.send_signal(signal.SIGUSR1)
        time.sleep(0.001)  # the system keeps one signal at a time; no assertion needs the pause
    running.stdin.close()
    assert running.wait(timeout=60) == 0
    assert int(running.stdout.read()) > 0


def test_a_handler_that_python_does_not_know_stays(stderr, tmp_path):
    """Method: another ``faulthandler``'s, which ``signal.getsignal`` does not see."""
    with open(tmp_path / "theirs", "w") as theirs:
        faulthandler.register(signal.SIGUSR1, file=theirs)
        try:
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            handled = StackSignal(lambda: pytest.fail("it is somebody else's"))
            handled.install()
            signal.raise_signal(signal.SIGUSR1)
            handled.remove()
            signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "theirs").read_text().count("in test_a_handler_that_python") == 2
    assert stderr.read_text() == ""


def test_one_that_the_program_installs_later_stays(stderr):
    handled = StackSignal(lambda: pytest.fail("it is somebody else's"))
    handled.install()
    called = []
    signal.signal(signal.SIGUSR1, lambda *_: called.append(1))
    try:
        handled.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert called == [1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_only_the_main_thread_changes_handlers(stderr):
    handled = StackSignal(list)

    def elsewhere(method):
        results = []
        thread = threading.Thread(target=lambda: results.append(method()))
        thread.start()
        thread.join()
        return results

    assert elsewhere(handled.install) == [None]
    assert not stacks._is_handled()
    handled.install()
    assert elsewhere(handled.remove) == [False]
    assert stacks._is_handled()
    assert handled.remove()
