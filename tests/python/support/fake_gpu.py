"""A GPU that is not there, for a torch without CUDA: its driver is a fake, its kernels are the host's.

Tensors are on `cuda:0` and everything above the driver is what runs on a real one: dispatch, storages, autograd's own
thread for the device, streams and marks. Kernels have ended when they return, so what this cannot show is a page that
leaves under one; the tests of the layers below do, on the same fake driver.
"""

import ctypes
import importlib
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

from support.isolation import SLOW_PACKAGES, describe_exit

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("fake_gpu/kernels.cpp", "fake_gpu/driver.cpp", "support/fake_cuda.cpp", "support/fake_cuda_streams.cpp")
MEMORY_BYTES = 4 << 30


def build() -> Path:
    """Build the fake, if it is not there yet, and return its library. In a process of its own: building loads it."""
    words = [sys.executable, "-m", "support.fake_gpu", "build"]
    done = subprocess.run(words, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1])


def in_gpu_child(library: Path, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 300) -> Any:
    """Return what `function(*arguments)` returns in a fresh process that has the GPU; importable and picklable.

    It is forked from a server that has the GPU and has imported the slow packages, and has run nothing with them.

    Raises:
        AssertionError: If it raised or died, or did what a real driver forgives or punishes later; with its output.
        TimeoutError: If it took longer; the server is gone then and the next call starts another.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("call", "answer", "output")]
        call, answer, output = files
        call.write_bytes(pickle.dumps((function, arguments)))
        status = _Server.of(library).run(files, timeout_seconds)
        assert status == 0, f"{describe_exit(status)}\n{output.read_text()}"
        return pickle.loads(answer.read_bytes())


class _Server:
    """A process that forks one child for each line that it reads: a call, where its answer and its output go."""

    _servers: ClassVar[dict[Path, "_Server"]] = {}

    def __init__(self, library: Path) -> None:
        words = [sys.executable, "-X", "faulthandler", "-m", "support.fake_gpu", "serve", str(library)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(words, env=_environment(), text=True, start_new_session=True, **pipes)

    @classmethod
    def of(cls, library: Path) -> "_Server":
        """Return the one of this process that still runs; it ends with this process, when its input does."""
        server = cls._servers.get(library)
        if server is None or server._process.poll() is not None:
            server = cls._servers[library] = cls(library)
        return server

    def run(self, files: list[Path], timeout_seconds: float) -> int:
        """Return the exit status of a child, negative if a signal ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(map(str, files)) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the child
            self._process.wait()
            raise TimeoutError(f"no answer in {timeout_seconds} s")
        return int(self._process.stdout.readline() or "1")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/python"), *filter(None, sys.path)])}


class _Slot:
    """The driver of this process, if it was given one."""

    driver: ctypes.CDLL | None = None


OTHERS_KERNELS = ("bitsandbytes", "torchao")
"""Packages that launch kernels of their own where they find a GPU, this one too."""


class Event:
    """A moment on a stream that never lags behind."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Take the time."""
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for nothing: what came before has ended."""

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this moment to a later one."""
        return 1e3 * (end._seconds - self._seconds)


def driver() -> ctypes.CDLL:
    """Return the driver of this process: what tests ask of it are functions named ``fake_gpu_...``."""
    assert _Slot.driver is not None
    return _Slot.driver


def load(library: Path) -> None:
    """Give this process the GPU. Before torch is imported, which looks for one once."""
    assert "torch" not in sys.modules
    for package in OTHERS_KERNELS:
        sys.modules[package] = None  # type: ignore[assignment] (as if it were not installed)
    _Slot.driver = ctypes.CDLL(str(library))
    import torch

    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment] (there is no runtime to begin with)
    torch.cuda._initialized = True
    torch.cuda.default_generators = (torch.default_generator,)  # the kernels are the host's, and draw from its numbers
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_setDevice = lambda _: None
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda _: 0
    torch.cuda.synchronize = lambda *_: None  # kernels have ended when they return
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch._C._cuda_emptyCache = lambda: None
    torch._C._cuda_memoryStats = lambda _: {}
    properties = SimpleNamespace(name="Fake", total_memory=MEMORY_BYTES, major=7, minor=0)  # before grouped products
    torch.cuda.get_device_properties = lambda _: properties
    torch.cuda.set_per_process_memory_fraction = lambda *_: None
    torch.cuda.get_per_process_memory_fraction = lambda *_: 1.0
    torch.cuda.mem_get_info = lambda *_: (MEMORY_BYTES, MEMORY_BYTES)


def _serve(library: str) -> None:
    load(Path(library))
    for package in SLOW_PACKAGES:
        importlib.import_module(package)
    for line in sys.stdin:
        call, answer, output = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            _run(call, answer, output)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def _run(call: str, answer: str, output: str) -> NoReturn:
    """Answer in a child, whose end is that of an interpreter: exit handlers run."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (0, 1, 2):
        os.dup2(file, stream)
    try:
        _answer(call, answer)
    except BaseException:  # noqa: BLE001 (its end is a status, what it was the output says)
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _answer(call: str, answer: str) -> None:
    function, arguments = pickle.loads(Path(call).read_bytes())
    result = function(*arguments)
    assert driver().fake_gpu_failures() == 0, "the fake driver complained, see above"
    Path(answer).write_bytes(pickle.dumps(result))


def _build() -> None:
    import torch
    from torch.utils import cpp_extension

    folder = ROOT / "build" / f"fake-gpu-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "fake_gpu",
        [str(ROOT / "tests/cpp" / source) for source in SOURCES],
        extra_include_paths=[str(ROOT / "csrc"), str(ROOT / "tests/cpp")],
        extra_cflags=["-std=c++20", "-O1"],
        extra_ldflags=[
            "-Wl,-soname,libcuda.so.1",  # found under the driver's name once it is loaded
            *(f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()),
            "-lgtest",
        ],
        build_directory=str(folder),
        is_python_module=False,
    )
    sys.stdout.write(f"{folder / 'fake_gpu.so'}\n")


if __name__ == "__main__":
    sys.modules["support.fake_gpu"] = sys.modules["__main__"]  # tests import this very module
    if sys.argv[1] == "build":
        _build()
    elif sys.argv[1] == "run":
        load(Path(sys.argv[2]))
        sys.argv = sys.argv[3:]
        runpy.run_module(sys.argv[0], run_name="__main__")
    else:
        _serve(sys.argv[2])
