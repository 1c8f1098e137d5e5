"""The socket of a process that may be asked what it does: whose it is, who may ask, and what is said instead."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from support.command import run_main

from torch_offload.errors import ConfigError
from torch_offload.system import dump_socket
from torch_offload.system.dump_socket import DumpSocket, request

pytestmark = pytest.mark.any_torch


@pytest.fixture
def runtime_directory(monkeypatch):
    """The user's runtime directory; its name is short."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.fixture
def temporary_directory(monkeypatch, tmp_path_factory):
    """Where temporary files are, for a user without a runtime directory."""
    tmp_path_factory.getbasetemp()  # which is elsewhere
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def listening():
    opened = DumpSocket()
    yield opened
    opened.close()


def ask_while_answering(listening, text="an answer"):
    """Return what is received, with somebody who answers."""
    received = []
    asking = threading.Thread(target=lambda: received.append(request(os.getpid())))
    asking.start()
    while asking.is_alive():
        listening.answer(lambda: text)
    asking.join()
    return received


def test_it_is_the_users_alone_and_goes_at_the_end(runtime_directory, listening):
    listening.open()
    [path] = runtime_directory.iterdir()
    assert path.name == f"torch_offload-{os.getpid()}.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask_while_answering(listening) == ["an answer"]
    listening.close()
    assert list(runtime_directory.iterdir()) == []


def test_without_a_runtime_directory_it_has_a_folder_of_its_own(temporary_directory, listening):
    listening.open()
    [folder] = temporary_directory.iterdir()
    assert folder.name == f"torch_offload-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert ask_while_answering(listening, "x" * 1_000_000) == ["x" * 1_000_000]
    listening.close()
    assert list(folder.iterdir()) == []


def test_who_asks_finds_it_with_another_environment(temporary_directory, listening, monkeypatch, tmp_path):
    listening.open()
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ask_while_answering(listening) == ["an answer"]


def test_one_that_was_left_behind_is_replaced(runtime_directory, listening):
    """Method: a socket that nobody listens at any more, as after a process that was killed."""
    path = runtime_directory / f"torch_offload-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listening.open()
    assert ask_while_answering(listening) == ["an answer"]


@pytest.mark.parametrize("planted", ["a link", "a file", "for others"])
def test_a_folder_that_somebody_planted_is_refused(temporary_directory, listening, tmp_path, planted):
    folder = temporary_directory / f"torch_offload-{os.geteuid()}"
    if planted == "a link":
        folder.symlink_to(tmp_path)
    elif planted == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o770)
    with pytest.raises(OSError, match=r"is no directory|is not this user's alone|File exists"):
        listening.open()
    assert listening.fileno() is None
    assert not any(path.is_socket() for path in (*temporary_directory.rglob("*"), *tmp_path.rglob("*")))


def test_a_folder_of_somebody_else_is_refused(temporary_directory, listening, monkeypatch):
    (temporary_directory / "torch_offload-12345").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        listening.open()


def test_other_users_are_refused(runtime_directory, listening, monkeypatch):
    """Method: who asks is taken for somebody else."""
    listening.open()
    monkeypatch.setattr(dump_socket, "peer_user", lambda connection: 12345)
    refused = []

    def ask() -> None:
        try:
            request(os.getpid())
        except ConfigError as error:
            refused.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        listening.answer(lambda: pytest.fail("made for somebody else"))
    asking.join()
    [message] = refused
    assert "does not listen" in message


def test_the_user_who_asks_is_known(runtime_directory, listening):
    listening.open()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(listening.path))
        assert dump_socket.peer_user(connection) == os.geteuid()


def test_nobody_asks(runtime_directory, listening):
    listening.open()
    listening.answer(lambda: pytest.fail("nobody asks"))


@pytest.mark.usefixtures("runtime_directory")
def test_a_process_that_does_not_listen_is_explained(monkeypatch, capsys):
    assert run_main(monkeypatch, "dump", str(os.getpid())) == 2
    assert capsys.readouterr().err == (
        f"torch-offload: process {os.getpid()} does not listen: it pages nothing now, or runs without the watchdog; "
        "start it with torch-offload run, or with torch_offload.Config(watchdog=True)\n"
    )


@pytest.mark.usefixtures("runtime_directory")
def test_a_process_that_has_ended_is_explained(monkeypatch, capsys):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert run_main(monkeypatch, "dump", str(ended.pid)) == 2
    assert capsys.readouterr().err == f"torch-offload: there is no process {ended.pid}\n"


@pytest.mark.usefixtures("runtime_directory")
def test_a_process_of_somebody_else_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert run_main(monkeypatch, "dump", str(os.getpid())) == 2
    assert "only that user may ask it" in capsys.readouterr().err


def test_a_process_that_is_stuck_is_explained(runtime_directory, listening, monkeypatch, capsys):
    """Method: one that listens and does not answer."""
    listening.open()
    monkeypatch.setattr(dump_socket, "ANSWER_SECONDS", 0.1)
    assert run_main(monkeypatch, "dump", str(os.getpid())) == 2
    assert f"kill -USR1 {os.getpid()} has it write the Python stacks" in capsys.readouterr().err


def test_what_names_would_have_a_terminal_do_is_spelled_out(runtime_directory, listening, monkeypatch, capsys):
    monkeypatch.setattr(dump_socket, "request", lambda process: "page 0 of \x1b[2Jweight")
    assert run_main(monkeypatch, "dump", "1") == 0
    assert capsys.readouterr().out == "page 0 of \\x1b[2Jweight\n"
