"""What every rank of a group over gloo does first, and options of its command."""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=5)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--group", required=True, help="file by which the ranks find one another")
    parser.add_argument("--ssd", required=True)


def join_group(options: argparse.Namespace) -> None:
    """Make this process a rank, with one thread."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{options.group}", rank=options.rank, world_size=options.ranks, timeout=PATIENCE
    )
