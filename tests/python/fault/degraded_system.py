"""Kernels and file systems that lack something: the same bits, and one line of the log says what is lacking.

    python -m fault.degraded_system RECORD.json

A cell is a system call that is refused, or a file system in a mount namespace of the case's own, which ends with it.
What a machine cannot make is named; with REQUIRE_ALL=1 it fails.
"""

import ctypes
import errno
import logging
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.bits import fingerprint
from support.refused_calls import (
    NO_DIRECT_SWITCH,
    NO_FALLOCATE,
    NO_NAMELESS_FILE,
    O_TMPFILE_BIT,
    RefusedCall,
    refuse,
)
from torch import nn

import torch_offload
from fault.case_runner import CaseRunner, DefectError, Report, Verdict
from fault.paged_training import (
    TOLD_BYTES,
    Plain,
    Training,
    begin_case,
    case_folder,
    check_paged,
    config_for,
    in_child,
    told_by,
)
from torch_offload import Config
from torch_offload.errors import OffloadError

LEAST = 10
STEPS = 6
OPTIMIZER = "fused"
CLONE_NEWNS = 0x00020000
MADV_HUGEPAGE = 14
MREMAP_DONTUNMAP = 4
MIB = 1 << 20

Mount = Callable[[Path, Path], Iterator[None]]
"""Makes a file system at the second folder; what it needs it keeps in the first."""


class NotHadError(Exception):
    """This machine cannot make the cell."""


@dataclass(frozen=True)
class Cell:
    """What is lacking, and what is said of it: in the log, or by the error with which it is refused."""

    refused: tuple[RefusedCall, ...] = ()
    mount: Mount | None = None
    words: tuple[str, ...] = ()
    is_refused: bool = False
    proof: Callable[[Path], object] | None = None  # raises OSError where it is refused and nothing is said of it
    is_loaded: bool = False  # what is trained is views of a file, which are read past the page cache where that works


NO_URING = tuple(RefusedCall(name, errno.EPERM) for name in ("io_uring_setup", "io_uring_enter", "io_uring_register"))
URING_WORDS = "I/O engine: threads"
CACHE_WORDS = "no direct I/O there, using the page cache"
GROWTH_WORDS = "no preallocation there, a full disk shows only at a write"


# --- File systems ---------------------------------------------------------------------------------------------------


def leave_mounts_of_others() -> None:
    """Give this process a list of mounts of its own: what it mounts goes when it ends."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(CLONE_NEWNS) != 0:
        raise NotHadError(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    run_tool("mount", "--make-rprivate", "/")


def run_tool(*command: str) -> None:
    if shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        raise NotHadError(f"{command[0]} is not installed")
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode != 0:
        raise NotHadError(f"{command[0]}: {ended.stderr.strip()[-300:]}")


def disk_image(kind: str, size_mib: int, *options: str) -> Mount:
    """A file system of this kind in a file."""

    @contextmanager
    def mount(folder: Path, point: Path) -> Iterator[None]:
        leave_mounts_of_others()
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(size_mib * MIB)
        run_tool(f"mkfs.{kind}", "-q", *options, str(image))
        run_tool("mount", "-o", "loop", str(image), str(point))
        yield

    return mount


@contextmanager
def overlay(folder: Path, point: Path) -> Iterator[None]:
    """As a container's root: a folder above another one."""
    leave_mounts_of_others()
    parts = {name: folder / name for name in ("lowerdir", "upperdir", "workdir")}
    for part in parts.values():
        part.mkdir()
    options = ",".join(f"{name}={part}" for name, part in parts.items())
    run_tool("mount", "-t", "overlay", "overlay", "-o", options, str(point))
    yield


@contextmanager
def passed_through(folder: Path, point: Path) -> Iterator[None]:
    """A program that serves another folder's files by FUSE."""
    leave_mounts_of_others()
    (folder / "behind").mkdir()
    if shutil.which("bindfs") is None:
        raise NotHadError("bindfs is not installed")
    serving = subprocess.Popen(["bindfs", "-f", str(folder / "behind"), str(point)])
    try:
        for _ in range(1000):
            if os.path.ismount(point) or serving.poll() is not None:
                break
            time.sleep(0.01)
        if not os.path.ismount(point):
            raise NotHadError("bindfs mounts nothing here")
        yield
    finally:
        serving.terminate()
        serving.wait()


def in_memory(kind: str) -> Mount:
    @contextmanager
    def mount(folder: Path, point: Path) -> Iterator[None]:
        leave_mounts_of_others()
        run_tool("mount", "-t", kind, kind, str(point))
        yield

    return mount


@contextmanager
def nothing_mounted(folder: Path, point: Path) -> Iterator[None]:
    yield


def open_nameless(folder: Path) -> int:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR)


def ask_for_huge_pages(folder: Path) -> None:
    mmap.mmap(-1, 4 * MIB).madvise(MADV_HUGEPAGE)


def prove(cell: Cell, point: Path) -> None:
    """What is to be lacking is."""
    if cell.mount is not None and not os.path.ismount(point):
        raise DefectError(Verdict.UNTYPED, "nothing is mounted: the case shows nothing")
    if cell.proof is None:
        return
    try:
        cell.proof(point)
    except OSError:
        return
    raise DefectError(Verdict.UNTYPED, "the call is not refused: the case shows nothing")


CELLS = {
    "no io_uring": Cell(NO_URING, words=(URING_WORDS, "no io_uring: io_uring_setup: Operation not permitted")),
    "kernel without io_uring": Cell(
        (RefusedCall("io_uring_setup", errno.ENOSYS),),
        words=(URING_WORDS, "no io_uring: io_uring_setup: Function not implemented"),
    ),
    "no nameless file": Cell((NO_NAMELESS_FILE,), proof=open_nameless),
    "nameless file taken for a folder": Cell(
        (RefusedCall("openat", errno.EISDIR, argument=2, mask=O_TMPFILE_BIT, value=O_TMPFILE_BIT),),
        proof=open_nameless,
    ),
    "checkpoint without direct I/O": Cell(
        (RefusedCall("openat", errno.EINVAL, argument=2, mask=os.O_DIRECT, value=os.O_DIRECT),), is_loaded=True
    ),
    "no direct I/O": Cell((NO_DIRECT_SWITCH,), words=(CACHE_WORDS,)),
    "direct I/O refused at a write": Cell((RefusedCall("pwrite", errno.EINVAL),), words=(CACHE_WORDS,)),
    "no fallocate": Cell((NO_FALLOCATE,), words=(GROWTH_WORDS,)),
    "no file in memory": Cell(
        (RefusedCall("memfd", errno.ENOSYS),), words=(URING_WORDS, "memfd_create failed: Function not implemented")
    ),
    "no huge pages": Cell(
        (RefusedCall("madvise", errno.EINVAL, argument=2, mask=0xFF, value=MADV_HUGEPAGE),), proof=ask_for_huge_pages
    ),
    "nothing of all that": Cell(
        (*NO_URING, NO_NAMELESS_FILE, NO_DIRECT_SWITCH, NO_FALLOCATE), words=(URING_WORDS, CACHE_WORDS, GROWTH_WORDS)
    ),
    "no moving of memory": Cell(
        (RefusedCall("mremap", errno.EINVAL, argument=3, mask=MREMAP_DONTUNMAP, value=MREMAP_DONTUNMAP),),
        words=("Linux 5.7 or newer is needed",),
        is_refused=True,
    ),
    "ext4": Cell(mount=disk_image("ext4", 64)),
    "xfs": Cell(mount=disk_image("xfs", 320)),
    "btrfs": Cell(mount=disk_image("btrfs", 160)),
    "overlay": Cell(mount=overlay),
    "FUSE": Cell(mount=passed_through, words=("is on fuse, which a program serves that may end or be slow",)),
    "tmpfs": Cell(mount=in_memory("tmpfs"), words=("is on tmpfs, which is memory; name a directory",), is_refused=True),
    "ramfs": Cell(mount=in_memory("ramfs"), words=("is on ramfs, which is memory; name a directory",), is_refused=True),
}


# --- A case ---------------------------------------------------------------------------------------------------------


def train_in(cell: Cell, folder: Path, plain: Plain, report: Report) -> None:
    """Train where something is lacking, or be refused."""
    begin_case(folder)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        with (cell.mount or nothing_mounted)(folder, folder / "scratch"):
            for call in cell.refused:
                refuse(call)
            prove(cell, folder / "scratch")
            report.injected += 1
            if cell.is_refused:
                be_refused(cell, folder, report)
            elif cell.is_loaded:
                train_loaded(folder, plain)
            else:
                train(folder, plain)
                check_words(cell, folder)
            report.text += told_by(folder)[-TOLD_BYTES:]
    except NotHadError as error:
        report.verdict, report.injected, report.text = Verdict.UNREACHED, 0, str(error)


def train(folder: Path, plain: Plain) -> None:
    training = Training(OPTIMIZER, config_for(folder / "scratch", keep_free=0))
    for number in range(STEPS):
        training.step(number)
    check_paged()
    plain.check(training, STEPS)


def train_loaded(folder: Path, plain: Plain) -> None:
    """Of weights that lie in a file, which is read through the page cache now."""
    file = folder / "weights.safetensors"
    save_file(wide_layers().state_dict(), file)
    expected = in_child(lambda: loaded_bits(file, None))
    if loaded_bits(file, config_for(folder / "scratch", keep_free=0, ram=12 * MIB)) != expected:
        raise DefectError(Verdict.WRONG, "not the bits of training in memory")
    check_paged()
    counters = torch_offload.report().counters
    if counters["direct_bytes"] != 0 or counters["left_in_file_bytes"] != 0:
        raise DefectError(Verdict.UNTYPED, "it was read past the page cache all the same: the case shows nothing")


def wide_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))


def loaded_bits(file: Path, config: Config | None) -> str:
    torch.set_num_threads(1)
    with torch.device("meta"):
        module = wide_layers()
    module.load_state_dict(load_file(file), assign=True)
    with file.open("rb") as written:
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is cached is copied from there
    if config is not None:
        torch_offload.wrap(module, config=config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    for number in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(8, 1024, generator=torch.Generator().manual_seed(number))
        module(inputs).square().mean().backward()
        optimizer.step()
    return repr(fingerprint({"module": module.state_dict(), "optimizer": optimizer.state_dict()}))


def be_refused(cell: Cell, folder: Path, report: Report) -> None:
    try:
        Training(OPTIMIZER, config_for(folder / "scratch", keep_free=0))
    except OffloadError as error:
        missing = [words for words in cell.words if words not in str(error)]
        if missing:
            raise DefectError(Verdict.UNTYPED, f"the error does not say {missing}") from error
        report.verdict, report.raised = Verdict.TYPED, 1
        return
    raise DefectError(Verdict.UNTYPED, "it was not refused")


def check_words(cell: Cell, folder: Path) -> None:
    """What is lacking is said once."""
    lines = told_by(folder).splitlines()
    for words in cell.words:
        if sum(words in line for line in lines) != 1:
            raise DefectError(Verdict.UNTYPED, f"not said once: {words!r}; said:\n{told_by(folder)}")
    said = [words for words in (URING_WORDS, CACHE_WORDS, GROWTH_WORDS) if any(words in line for line in lines)]
    if not cell.mount and set(said) - set(cell.words):
        raise DefectError(Verdict.UNTYPED, f"said although it is not lacking: {set(said) - set(cell.words)}")


def main(record: Path) -> None:
    runner = CaseRunner()
    plain = Plain(OPTIMIZER, STEPS)
    for name, cell in CELLS.items():
        with case_folder(record.parent, "cell") as folder:
            report = runner.run(name, lambda report: train_in(cell, folder, plain, report))  # noqa: B023 (called here)
        if report is not None and report.verdict == Verdict.UNREACHED:
            sys.stderr.write(f"{name}: not to be had here: {report.text}\n")
    runner.finish(record, least=len(CELLS) if os.environ.get("REQUIRE_ALL") == "1" else LEAST)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
