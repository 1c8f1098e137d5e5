"""Runs an operator over one small tensor on request: many times over one that is paged and in memory, and as many over
one that is not paged.

Reads one command per line from stdin ("step" or "finish") and answers each with a JSON line on stdout.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.machine import CpuSeconds
from torch import nn

import torch_offload

CHUNKS = 21
CALLS = 2_500  # of a chunk
WIDTH = 16  # one page, and hardly anything to compute


def nanoseconds(weight: torch.Tensor) -> float:
    """Return what a call takes that reads and writes the tensor."""
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        weight.mul_(1.0)
    return (time.perf_counter_ns() - begin) / CALLS


def measured(paged: torch.Tensor, ordinary: torch.Tensor) -> dict[str, Any]:
    begin = CpuSeconds.now()
    chunks = [(nanoseconds(paged), nanoseconds(ordinary)) for _ in range(CHUNKS)]
    in_memory, of_torch = (median(times) for times in zip(*chunks, strict=True))
    used = CpuSeconds.now().since(begin)
    return used | {"paged_ns": in_memory, "plain_ns": of_torch, "pin_ns": in_memory - of_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
    ordinary = module.weight.detach().clone()
    config = torch_offload.Config(ram="16MiB", ssd=options.ssd, min_paged_bytes=0, page_elements=4096)
    torch_offload.wrap(module, config=config)
    pins = torch_offload.report().pins
    calls = 0
    package = str(Path(torch_offload.__file__).resolve().parent)
    print(json.dumps({"package": package}), flush=True)
    for line in sys.stdin:
        if line.strip() == "finish":
            answer = {"package": package, "pins": torch_offload.report().pins - pins, "calls": calls}
            print(json.dumps(answer), flush=True)
        else:
            calls += CHUNKS * CALLS
            print(json.dumps(measured(module.weight, ordinary)), flush=True)


if __name__ == "__main__":
    main()
