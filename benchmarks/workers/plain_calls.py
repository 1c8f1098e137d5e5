"""Calls operators on plain tensors, with a stop of the process before each call, for who counts instructions.

The first answer on stdout, a JSON line, names the calls. Then, before torch_offload is imported and again while a
module is wrapped and has trained, each call is made `--repeats` times, with SIGSTOP before the first and after each.
"""

import argparse
import ctypes
import gc
import json
import os
import signal
from collections.abc import Callable

import torch
from torch import nn

PTRACE_TRACEME = 0
WARM_UP_CALLS = 20  # the interpreter settles on how it runs a loop


def calls() -> dict[str, Callable[[], object]]:
    """Return what is counted. All are too small for a second thread."""
    one, other = torch.ones(64), torch.ones(64)
    matrix, rows, product = torch.ones(16, 16), torch.ones(4, 16), torch.empty(4, 16)
    listed, others = ([torch.ones(16) for _ in range(4)] for _ in range(2))
    layer = nn.Linear(16, 16)
    return {
        "add in place": lambda: one.add_(other),
        "add": lambda: one + other,
        "view": lambda: matrix.t(),
        "matrix product into a tensor": lambda: torch.mm(rows, matrix, out=product),
        "additions of lists": lambda: torch._foreach_add_(listed, others),
        "make a tensor": lambda: torch.empty(64),
        "forward and backward": lambda: layer(rows).sum().backward(),
    }


def make(named: dict[str, Callable[[], object]], repeats: int) -> None:
    for call in named.values():
        for _ in range(WARM_UP_CALLS):
            call()
        gc.collect()
        for _ in range(repeats):
            os.kill(os.getpid(), signal.SIGSTOP)
            call()
        os.kill(os.getpid(), signal.SIGSTOP)


def train_wrapped(folder: str) -> nn.Module:
    """Have an engine page something else."""
    import torch_offload

    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    torch_offload.wrap(module, ram="16MiB", ssd=folder)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    named = calls()
    print(json.dumps({"calls": list(named)}), flush=True)
    if ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_TRACEME, 0, None, None) != 0:
        raise OSError(ctypes.get_errno(), "this process may not be traced")
    make(named, options.repeats)
    module = train_wrapped(options.ssd)
    make(named, options.repeats)
    del module


if __name__ == "__main__":
    main()
