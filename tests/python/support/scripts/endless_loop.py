"""Trains until a signal comes; says each step."""

import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1_000_000):
    model(torch.randn(8, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}", flush=True)  # noqa: T201
