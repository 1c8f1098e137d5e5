"""Trains with the other ranks until the one whose number is given fails: it asks for memory that the budget lacks."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import torch_offload

FOLDER, FAILING = sys.argv[1:]

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo")
module = torch_offload.wrap(nn.Linear(256, 256), ram="16MiB", ssd=FOLDER)
for step in range(3):
    module(torch.ones(1, 256)).sum().backward()
    if step == 1 and dist.get_rank() == int(FAILING):
        torch.empty(64 << 20)
    dist.all_reduce(module.bias.grad)
