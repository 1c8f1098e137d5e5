"""Finds where heat was from where it is later, through all steps of a solver, under a memory budget.

    python examples/without_a_module.py --ram 8GiB --ssd /mnt/nvme --size 2048 --moments 400

There is no module to wrap: what autograd saves of the steps leaves memory, the gradient is the same bit for bit.
"""

import argparse

import torch
from example_run import paging
from torch.nn.functional import pad

import torch_offload


def later(heat: torch.Tensor, moments: int) -> torch.Tensor:
    """Return the heat after so many moments, on a square whose border stays cold; it spreads faster where it is hot."""
    for _ in range(moments):
        around = pad(heat, (1, 1, 1, 1))
        spread = around[2:, 1:-1] + around[:-2, 1:-1] + around[1:-1, 2:] + around[1:-1, :-2] - 4 * heat
        heat = heat + 0.2 * torch.sigmoid(heat) * spread
    return heat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", default="24MiB", help="hard limit of memory for tensors")
    parser.add_argument("--ssd", help="directory on a real disk; default: one for temporary files")
    parser.add_argument("--size", type=int, default=512, help="points on each side of the square")
    parser.add_argument("--moments", type=int, default=20, help="steps of the solver")
    parser.add_argument("--steps", type=int, default=3, help="steps of gradient descent")
    options = parser.parse_args()
    with torch_offload.register_allocator(ram=options.ram, ssd=options.ssd):
        true = torch.zeros(options.size, options.size)
        true[options.size // 4 : options.size // 2, options.size // 4 : options.size // 2] = 1
        seen = later(true, options.moments)
        guess = torch.zeros_like(true).requires_grad_()
        optimizer = torch.optim.SGD([guess], lr=0.5 * options.size**2)
        losses = []
        for _ in range(options.steps):
            loss = (later(guess, options.moments) - seen).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"without a module: {options.steps} steps, loss {losses[0]:.4g} to {losses[-1]:.4g}")
        print(paging())


if __name__ == "__main__":
    main()
