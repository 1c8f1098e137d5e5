"""A module of a mebibyte with its training state, trained step by step, and what must be true after an error."""

import torch
from torch import nn

import torch_offload
from support.bits import digest
from support.paging import assert_bitwise_equal, assert_was_paged
from torch_offload import Config

MIB = 1 << 20
TIGHT = "576KiB"  # half of the state of `make_module`


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128))


def step(
    module: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1, *, clips: bool = False, features: int = 128
) -> torch.Tensor:
    batch = torch.randn(8, features, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = module(batch).square().mean()
    loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    optimizer.step()
    return loss.detach().clone()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, fused=True)


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """Hash every tensor, one after the other: copies of all of them would not fit a tight budget."""
    content = {name: digest(value) for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            content[f"{name}.grad"] = digest(parameter.grad)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            content[f"{name}.{key}"] = digest(value)
    return content


def assert_usable(scratch) -> None:
    """A module can be wrapped, trained in half of its state and unwrapped, and trains as in memory."""

    def train(module: nn.Module) -> list:
        optimizer = adamw(module)
        return [[step(module, optimizer) for _ in range(3)], snapshot(module)]

    expected = train(make_module())
    paged = make_module()
    config = Config(ram=TIGHT, ssd=scratch, min_paged_bytes=0, page_elements=4096)
    assert torch_offload.wrap(paged, config=config) is paged
    assert_bitwise_equal(train(paged), expected)
    assert_was_paged()
    torch_offload.unwrap(paged)
