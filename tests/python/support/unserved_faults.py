"""Programs that read a damaged page behind torch and then end.

    python -m support.unserved_faults MOMENT DIRECTORY

MOMENT is when: one of the functions below.
"""

import atexit
import ctypes
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

LATE = []
atexit.register(lambda: [read() for read in LATE])  # before torch_offload is imported: runs after its own

import torch_offload  # noqa: E402
from support.bits import raw_bytes  # noqa: E402
from support.damage import flip_bits  # noqa: E402
from support.paging import page_out, wait_until  # noqa: E402
from torch_offload import Config, PageCorruptError  # noqa: E402
from torch_offload.runtime.process import PROCESS  # noqa: E402

WIDTH = 128
PAGE = "page 0 of 0.weight"


def raw_view(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over a tensor's memory that keeps nothing in memory."""
    return np.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=np.float32)


def damage(module: nn.Module, scratch: Path) -> torch.Tensor:
    """Damage the first page of ``0.weight`` where it is stored. Returns what the weight was."""
    kept = module[0].weight.detach().clone()
    page_out(module)
    flip_bits(scratch, raw_bytes(kept)[:4096].numpy().tobytes())
    page_out(module)  # what was read ahead before the damage goes
    assert not torch_offload.is_resident(module[0].weight)
    return kept


def after_the_main_thread(read) -> None:
    """Call `read` in a thread once the interpreter waits for that thread alone."""

    def wait_and_read() -> None:
        threading.main_thread().join()
        read()

    threading.Thread(target=wait_and_read).start()


def in_a_pool(read) -> None:
    """Call `read` in a pool once the interpreter waits for pools, before it waits for other threads."""
    main = threading.main_thread()

    def is_waited_for() -> bool:
        frame = sys._current_frames()[main.ident]
        while frame.f_back is not None:
            frame = frame.f_back
        return main.is_alive() and frame.f_globals is vars(threading)

    def wait_and_read() -> None:
        wait_until(is_waited_for, "the program had ended")
        read()

    ThreadPoolExecutor(1).submit(wait_and_read)


def close_after(read) -> None:
    """Nothing of the engine is left when the error would be raised."""
    read()
    PROCESS.close_session()
    MODULES.clear()
    gc.collect()


def catch(read) -> None:
    try:
        read()
    except PageCorruptError:
        return
    raise AssertionError("nothing was raised")


MODULES: list[nn.Module] = []
MOMENTS = {
    "nothing": lambda read: None,
    "last statement": lambda read: read(),
    "caught": catch,
    "early exit function": lambda read: atexit.register(read),
    "late exit function": LATE.append,
    "thread": after_the_main_thread,
    "pool": in_a_pool,
    "closed": lambda read: after_the_main_thread(partial(close_after, read)),
}


def main(moment: str, scratch: Path) -> None:
    """Prepare the page and read it at that moment."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    MODULES.append(torch_offload.wrap(module, config=Config(ram="8MiB", ssd=scratch, min_paged_bytes=0)))
    array = raw_view(module[0].weight)
    damage(module, scratch)
    del module
    MOMENTS[moment](array.sum)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
