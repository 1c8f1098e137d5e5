"""Writes the engine's report of every process of a test when it ends, and keeps torch's process groups from ending it.

Where FAKE_GPU names the library of one, every process has it.

The launcher's site hook must chain to it.
"""

import atexit
import ctypes
import functools
import os
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

GROUPS = "torch.distributed.distributed_c10d"
FUTEX = "202"  # x86-64


def write_report() -> None:
    package = sys.modules.get("torch_offload")
    if package is None or package.runtime.process.PROCESS.session is None:  # it paged nothing
        return
    Path(os.environ["REPORT_DIRECTORY"], f"{os.getpid()}.json").write_text(package.report().to_json())


class KeepGroups:
    """Never frees a process group that a program destroys.

    With torch 2.13 the last owner of one may be DDP's reducer, which is freed with the GIL held: the group waits for
    its threads, and one of these waits for the GIL to free a collective whose tensors Python knows. Of six plain runs
    of TRL's sft on two ranks, three at once on two busy cores, two ended there.
    """

    def find_spec(self, name, path, target=None):
        if name != GROUPS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_keep(module):
            execute(module)
            module.destroy_process_group = keeping(module, module.destroy_process_group)

        spec.loader.exec_module = execute_and_keep
        return spec


def keeping(module, destroy):
    @functools.wraps(destroy)
    def destroy_process_group(*arguments, **options):
        for group in module._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        destroy(*arguments, **options)

    return destroy_process_group


def wait_for_collectives() -> None:
    """Wait until gloo's threads have freed their last collectives, which takes the GIL: an ending Python keeps it.

    With torch 2.13 such a thread aborts the process ("terminate called without an active exception"): 13 of 32 plain
    pairs of ranks that ended right after a collective, four pairs at once on two cores.
    """
    ends_at = time.monotonic() + 10
    while not all(map(waits_for_work, Path("/proc/self/task").iterdir())) and time.monotonic() < ends_at:
        time.sleep(0.001)  # gives the GIL up; the condition decides, not how long this is


def waits_for_work(thread: Path) -> bool:
    """Say whether a thread of gloo sleeps until woken, as for work alone: the GIL is waited for with a timeout."""
    try:
        if (thread / "comm").read_text() != "pt_gloo_runloop\n":
            return True
        call, *arguments = (thread / "syscall").read_text().split()
    except OSError:  # it has ended
        return True
    return call == FUTEX and int(arguments[3], 16) == 0


if "REPORT_DIRECTORY" in os.environ:
    atexit.register(write_report)
    atexit.register(wait_for_collectives)
    sys.meta_path.insert(0, KeepGroups())
if "FAKE_GPU" in os.environ:
    from support import fake_gpu

    fake_gpu.load(Path(os.environ["FAKE_GPU"]))
