"""A training loop as a tutorial has it: PyTorch alone.

python plain_loop.py WEIGHTS_FILE
"""

import sys

import torch
from safetensors.torch import save_file
from torch import nn

WIDTH = 128
STEPS = 4

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)), nn.Linear(WIDTH, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(STEPS):
    batch, target = torch.randn(16, WIDTH), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(batch), target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
save_file(model.state_dict(), sys.argv[1])
