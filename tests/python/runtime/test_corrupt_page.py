"""A page that the SSD gives back with other bytes is an error that names the tensor, and nothing else is lost.

Method: one bit of the scratch file is flipped, where the first bytes of a paged tensor are found in it.
"""

from pathlib import Path

import pytest
import torch
from support.bits import digest, raw_bytes
from support.damage import flip_bits
from support.paging import page_out
from torch import Tensor, nn

import torch_offload
from torch_offload import Config, PageCorruptError

WIDTH = 128


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def backward(module: nn.Module) -> None:
    module(torch.ones(4, WIDTH)).square().mean().backward()


def replace_parameter(weight: nn.Parameter, states: dict[str, Tensor], value: Tensor) -> None:
    weight.data = value


def replace_gradient(weight: nn.Parameter, states: dict[str, Tensor], value: Tensor) -> None:
    weight.grad = value


def replace_state(weight: nn.Parameter, states: dict[str, Tensor], value: Tensor) -> None:
    states["exp_avg"] = value


# How it is found, how it is replaced, and what the message calls it.
ROLES = {
    "parameter": (lambda weight, states: weight.detach(), replace_parameter, r"page 0 of 0\.weight"),
    "gradient": (lambda weight, states: weight.grad, replace_gradient, r"page 0 of gradient of 0\.weight"),
    "state": (lambda weight, states: states["exp_avg"], replace_state, "page 0 of optimizer state"),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_flipped_bit_is_an_error_that_names_the_tensor(config: Config, scratch: Path, role: str) -> None:
    """Each time it is asked for; the others have their bits, and once it is replaced training goes on equal."""
    find, replace, label = ROLES[role]
    outcomes = []
    for is_paged in (False, True):
        module = torch_offload.wrap(make_module(), config=config) if is_paged else make_module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        backward(module)
        optimizer.step()
        if is_paged:
            weight = module[0].weight
            states = optimizer.state[weight]
            kept = damage(module, find(weight, states), scratch, label)
            replace(weight, states, kept)
        optimizer.step()
        backward(module)
        outcomes.append([digest(tensor) for weight in module.parameters() for tensor in (weight, weight.grad)])
    assert outcomes[1] == outcomes[0]


def damage(module: nn.Module, tensor: Tensor, scratch: Path, label: str) -> Tensor:
    """Flip a bit of the tensor while it is away and see what comes of it; return what it was."""
    torch_offload.flush()
    before = [digest(weight) for weight in module[1].parameters()]
    kept = tensor.clone()
    page_out(module)
    flip_bits(scratch, raw_bytes(kept)[:4096].numpy().tobytes())
    torch_offload.evict(tensor)  # the engine may have read it again before its bit was flipped
    for _ in range(2):
        with pytest.raises(PageCorruptError, match=label):
            tensor.sum()
    assert [digest(weight) for weight in module[1].parameters()] == before
    return kept
