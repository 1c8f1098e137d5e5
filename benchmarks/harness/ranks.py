"""What every rank of a group over gloo does: options of its command, joining, and what it answers."""

import argparse
import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_offload

PATIENCE = timedelta(minutes=5)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--group", required=True, help="file by which the ranks find one another")
    parser.add_argument(
        "--backend", choices=("gloo", "fake"), default="gloo", help="fake: this process is the only one of its group"
    )


def join_group(options: argparse.Namespace) -> None:
    """Make this process a rank, with one thread. In a fake group collectives return at once, with what this rank has in
    place of what others would have sent: memory and traffic of the rank are those of a real group, values are not.
    """
    torch.set_num_threads(1)
    if options.backend == "fake":
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend known

        dist.init_process_group("fake", store=dist.HashStore(), rank=options.rank, world_size=options.ranks)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", f"file://{options.group}", rank=options.rank, world_size=options.ranks, timeout=PATIENCE
    )


def digests_of(tensors: Iterable[Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for tensor in tensors]


def paging_figures(budget_bytes: int) -> dict[str, Any]:
    """Return what shows that this rank paged."""
    report = torch_offload.report()
    return {
        "faults": report.faults,
        "evictions": report.evictions,
        "budget_bytes": budget_bytes,
        "peak_bytes": report.host_peak_bytes,
    }
