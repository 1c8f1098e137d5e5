"""Higher-order operators, and parameters that change their tensor, on a wrapped module: every bit is plain torch's.

Method: the same program on a module in memory and on a wrapped one whose pages have left; counters show that they came
back by the operators that used them.
"""

import warnings

import pytest
import torch
from support.bits import digest
from support.paging import assert_bitwise_equal, page_out
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import torch_offload
from torch_offload import _C
from torch_offload.runtime.process import PROCESS

WIDTH = 64
HEADS, TOKENS = 2, 32


class Weights(nn.Module):
    """A matrix, and a number per pair of tokens and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight


def rows() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))


def heads(seed: int) -> torch.Tensor:
    return torch.randn(1, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


higher_order = torch.ops.higher_order


def cond(weights: Weights) -> object:
    branches = (lambda value: (value.sin() @ value,)), (lambda value: (value.cos(),))
    (result,) = higher_order.cond(torch.tensor(True), *branches, (weights.weight,))
    return result, torch.autograd.grad(result.square().mean(), [weights.weight])


def while_loop(weights: Weights) -> object:
    return higher_order.while_loop(
        lambda count, _: count < 3,
        lambda count, value: (count + 1, torch.tanh(value)),
        (torch.tensor(0), weights.weight.detach()),
        (),
    )


def scan(weights: Weights) -> object:
    from torch._higher_order_ops.scan import scan_op

    def step(carry: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tanh(carry + row), carry * row]

    with torch.no_grad():
        return scan_op(step, [weights.weight[0]], [weights.weight], [])


def flex(weights: Weights) -> object:
    """A learned bias per pair of tokens, and its gradient."""

    def biased(score, _, head, query, key):
        return score + weights.bias[head, query, key]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        result = flex_attention(heads(1), heads(2), heads(3), score_mod=biased)
    (gradient,) = torch.autograd.grad(result.square().mean(), [weights.bias])
    return result, gradient


def checkpoint_in_a_captured_graph(weights: Weights) -> object:
    def layer(value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value @ weights.weight)

    compiled = torch.compile(
        lambda value: torch.utils.checkpoint.checkpoint(layer, value, use_reentrant=False), backend="eager"
    )
    result = compiled(rows())
    return result, torch.autograd.grad(result.square().mean(), [weights.weight])


@pytest.mark.parametrize(
    "program", [cond, while_loop, scan, flex, checkpoint_in_a_captured_graph], ids=lambda program: program.__name__
)
def test_higher_order_operators(config, program):
    """Operands that are paged, and what the operators inside them use."""
    expected = program(Weights())
    paged = torch_offload.wrap(Weights(), config=config)
    page_out(paged)
    assert_bitwise_equal(program(paged), expected)
    report = torch_offload.report()
    assert report.ssd_read_bytes >= paged.bias.nbytes
    assert report.faults == 0


def test_higher_order_operators_are_as_before_afterwards(config):
    """The engine puts its replacement back."""
    before = torch._ops._compute_keyset
    torch_offload.wrap(Weights(), config=config)
    assert torch._ops._compute_keyset is not before
    PROCESS.close_session()
    assert torch._ops._compute_keyset is before


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(rows()).square().mean().backward()
    optimizer.step()


def test_a_parameter_that_is_swapped_is_paged_at_once(config):
    """With its gradient from then on, beside other parameters of the module; what it was swapped with is ordinary."""

    def run(module: Weights, between) -> list[object]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for seed in range(3):
            other = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)))
            optimizer.zero_grad()
            torch.utils.swap_tensors(module.weight, other)
            between(module, other)
            train(module, optimizer)
        return [digest(module.weight), digest(module.weight.grad)]

    def check(module: Weights, other: torch.Tensor) -> None:
        assert _C.is_managed(module.weight)
        page_out(module)

    expected = run(Weights(), lambda *_: None)
    module = torch_offload.wrap(Weights(), config=config)
    assert run(module, check) == expected
    assert _C.is_managed(module.weight.grad)
    assert sorted(label for label, _ in PROCESS.session.tensors()) == ["bias", "weight"]
    torch_offload.unwrap(module)
    assert not _C.is_managed(module.weight)
    assert not module.weight._post_accumulate_grad_hooks


def test_conversions_that_swap(config):
    """`torch.__future__.set_swap_module_params_on_conversion`: parameters stay the same objects."""

    def run(module: Weights, between) -> list[object]:
        before = list(module.parameters())
        module.to(torch.float64)
        assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
        between()
        module(rows().double()).square().mean().backward()
        return [digest(module.weight), digest(module.weight.grad)]

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        expected = run(Weights(), lambda: None)
        module = torch_offload.wrap(Weights(), config=config)
        assert run(module, lambda: page_out(module)) == expected
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert _C.is_managed(module.weight)
    assert _C.is_managed(module.weight.grad)
    assert torch_offload.report().ssd_read_bytes >= module.weight.nbytes


def test_a_swap_that_torch_refuses_changes_nothing(config):
    """A weak reference of the script's own; the parameter stays paged, and hooked."""
    module = torch_offload.wrap(Weights(), config=config)
    weak = torch.utils.weak.WeakIdRef(module.weight)
    seen = []
    module.weight.register_post_accumulate_grad_hook(seen.append)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(module.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))
    assert weak() is module.weight
    module(rows()).sum().backward()
    assert len(seen) == 1
    assert _C.is_managed(module.weight)
    assert _C.is_managed(module.weight.grad)
