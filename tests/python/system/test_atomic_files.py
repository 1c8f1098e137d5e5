"""Files appear complete or not at all, whoever prepared the folder and whatever the file system lacks."""

import errno
import os
import re
import stat
import threading

import pytest

from torch_offload.system import atomic_files
from torch_offload.system.atomic_files import appearing, readable_path, write_whole

pytestmark = pytest.mark.any_torch


@pytest.fixture(params=["nameless files", "named files"])
def folder(request, tmp_path, monkeypatch):
    """A folder of a file system with files that have no name yet, and of one without."""
    if request.param == "named files":
        real = os.open

        def open_named(path, flags, *args, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return real(path, flags, *args, **options)

        monkeypatch.setattr(atomic_files.os, "open", open_named)
    return tmp_path


def test_a_file_appears_when_it_is_complete(folder):
    """While it is written there is no such name, and it can be read all the same."""
    with appearing(folder / "file") as file:
        os.write(file, b"content")
        assert not (folder / "file").exists()
        with open(readable_path(file), "rb") as unfinished:
            assert unfinished.read() == b"content"
    assert (folder / "file").read_bytes() == b"content"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_file_that_fails_leaves_what_was_there(folder):
    """An exception while it is written, and an error when it is named."""
    write_whole(folder / "file", b"before")

    def write_half() -> None:
        with appearing(folder / "file") as file:
            os.write(file, b"half")
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        write_half()
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_bytes() == b"before"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_synced_or_named_leaves_what_was_there(folder, monkeypatch, call):
    """As on a disk that fails at the very end."""
    write_whole(folder / "file", b"before")

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, call, fail)
        with pytest.raises(OSError, match="Input/output error"):
            write_whole(folder / "file", b"after")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_bytes() == b"before"


def test_a_folder_that_cannot_be_synced_is_said_and_the_file_is_there(folder, monkeypatch, caplog):
    """The file is whole: only a power cut could still undo it."""
    real = os.fsync

    def sync_files_only(opened):
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(opened)

    monkeypatch.setattr(atomic_files.os, "fsync", sync_files_only)
    write_whole(folder / "file", b"content")
    assert (folder / "file").read_bytes() == b"content"
    assert "cannot be synced" in caplog.text


def test_planted_links_are_replaced_and_not_followed(folder):
    """A link, a hard link and a FIFO in the file's place: what they lead to is as it was."""
    victim = folder / "victim"
    victim.write_bytes(b"of somebody else")
    (folder / "link").symlink_to(victim)
    os.link(victim, folder / "hard link")
    os.mkfifo(folder / "fifo")
    for name in ("link", "hard link", "fifo"):
        write_whole(folder / name, b"ours")
        assert (folder / name).read_bytes() == b"ours"
        assert not (folder / name).is_symlink()
    assert victim.read_bytes() == b"of somebody else"


def test_the_mode_of_what_is_replaced_stays(folder):
    """A private file stays private; a new one is as the umask says."""
    write_whole(folder / "file", b"1")
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o666 & ~mask
    (folder / "file").chmod(0o600)
    write_whole(folder / "file", b"2")
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o600


def test_two_writers_leave_the_file_of_one_of_them(folder):
    """Four threads, 25 files each, one name: what is there is always whole."""
    contents = [bytes([writer]) * 10_000 for writer in range(4)]
    seen = []

    def write(content: bytes) -> None:
        for _ in range(25):
            write_whole(folder / "file", content)
            seen.append((folder / "file").read_bytes())

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 100
    assert set(seen) <= set(contents)
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_long_name_fits(folder):
    """The temporary name is longer than the file's, and file systems have a limit."""
    name = "ö" * 127
    write_whole(folder / name, b"content")
    assert (folder / name).read_bytes() == b"content"


def test_a_killed_writer_leaves_no_file_with_the_name(folder):
    """A child ends in the middle: the old file is there, and at most a hidden one besides."""
    write_whole(folder / "file", b"before")
    child = os.fork()
    if child == 0:
        with appearing(folder / "file") as file:
            os.write(file, b"half")
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (folder / "file").read_bytes() == b"before"
    assert all(path.name == "file" or path.name.startswith(".file.") for path in folder.iterdir())


def test_an_error_of_a_descriptor_names_the_file(tmp_path, monkeypatch):
    """The system knows only the descriptor: a user is to be told which disk is full."""

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{re.escape(str(tmp_path / 'file'))}'"):
        write_whole(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []
