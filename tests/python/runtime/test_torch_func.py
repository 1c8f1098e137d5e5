"""torch.func over a wrapped module: what it is given for a call is left alone, and every bit is that of plain torch.

Method: the same program on a module in memory and on a wrapped one whose pages leave between calls; counters show that
pages moved. The search of a module for new tensors comes in the first calls and every 64th, so loops are longer.
"""

import copy

import pytest
import torch
from support.paging import assert_bitwise_equal, page_out
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import torch_offload
from torch_offload import _C
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.tracked_module import CALLS_BETWEEN_SEARCHES

WIDTH = 64
ROWS = 4
INNER_CALLS = 100
CALLS_BETWEEN_EVICTIONS = 20


class Network(nn.Module):
    """Two layers with a buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(value) * self.scale))


def make_network() -> Network:
    torch.manual_seed(0)
    return Network()


def rows(seed: int, count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(network, weights, value):
    return functional_call(network, weights, (value,)).square().mean()


def maml(network, between):
    """One outer step over an inner loop, a tenth of which is differentiated through."""
    weights = dict(network.named_parameters())
    for call in range(INNER_CALLS):
        if call % CALLS_BETWEEN_EVICTIONS == 0:
            between()
        inner = loss_of(network, weights, rows(call))
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=call % 10 == 0)
        weights = {
            name: weight - 0.01 * gradient for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
    loss_of(network, weights, rows(INNER_CALLS)).backward()
    return [weights, {name: parameter.grad for name, parameter in network.named_parameters()}]


def first_order_maml(network, between):
    """Fast weights that are leaves: detached, with a gradient of their own."""
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in network.named_parameters()}
    for call in range(INNER_CALLS):
        if call % CALLS_BETWEEN_EVICTIONS == 0:
            between()
        inner = loss_of(network, weights, rows(call))
        gradients = torch.autograd.grad(inner, list(weights.values()))
        weights = {
            name: (weight.detach() - 0.01 * gradient).requires_grad_()
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
    return weights


def detached(network):
    return {name: weight.detach() for name, weight in network.named_parameters()}


def per_sample_gradients(network, between):
    buffers = dict(network.named_buffers())

    def loss(weights, value):
        return functional_call(network, (weights, buffers), (value.unsqueeze(0),)).square().mean()

    for call in range(CALLS_BETWEEN_SEARCHES + 2):
        if call % CALLS_BETWEEN_EVICTIONS == 0:
            between()
        found = vmap(grad(loss), in_dims=(None, 0))(detached(network), rows(call))
    return found


def gradient(network, between):
    for call in range(CALLS_BETWEEN_SEARCHES + 2):
        if call % CALLS_BETWEEN_EVICTIONS == 0:
            between()
        found = grad(lambda weights, call=call: loss_of(network, weights, rows(call)))(detached(network))
    return found


def gradient_by_the_input(network, between):
    """The weights stay in the module."""
    between()
    return [grad(lambda value: network(value).square().mean())(rows(0)), jacrev(network)(rows(1, 1))]


def forward_mode(network, between):
    weights = detached(network)
    between()
    tangents = {name: torch.ones_like(weight) for name, weight in weights.items()}
    return jvp(lambda given: functional_call(network, given, (rows(0),)), (weights,), (tangents,))


def second_order(network, between):
    between()
    return hessian(lambda value: network(value.unsqueeze(0)).square().mean())(rows(0)[0])


def ensemble(network, between):
    """vmap over stacked weights of several models."""
    between()
    weights = {name: torch.stack([weight, weight * 2, weight * 3]) for name, weight in network.named_parameters()}
    value = rows(0)
    return vmap(lambda stacked: functional_call(network, stacked, (value,)))(weights)


PROGRAMS = [
    maml,
    first_order_maml,
    per_sample_gradients,
    gradient,
    gradient_by_the_input,
    forward_mode,
    second_order,
    ensemble,
]


@pytest.mark.parametrize("activations", ["page", "keep"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_give_equal_bits_while_pages_leave(config, program, activations):
    """With activations paged as well, where torch lets them."""
    expected = program(make_network(), lambda: None)
    network = torch_offload.wrap(make_network(), config=config.replace(activations=activations))
    found = program(network, lambda: page_out(network))
    assert_bitwise_equal(found, expected)
    report = torch_offload.report()
    assert report.ssd_read_bytes > 0
    assert report.faults == 0
    assert all(_C.is_managed(parameter) for parameter in network.parameters())


def test_training_goes_on_after_computed_weights_were_in_place(config):
    """The module's own parameters are hooked and paged as before: gradients and states become pages."""

    def run(network, between):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        for step in range(4):
            computed = {name: weight * 2 for name, weight in network.named_parameters()}
            between()
            (loss_of(network, computed, rows(step)) + network(rows(step)).square().mean()).backward()
            optimizer.step()
            if step < 3:
                optimizer.zero_grad()
        return [dict(network.named_parameters()), [parameter.grad for parameter in network.parameters()]]

    expected = run(make_network(), lambda: None)
    network = torch_offload.wrap(make_network(), config=config)
    assert_bitwise_equal(run(network, lambda: page_out(network)), expected)
    assert all(_C.is_managed(parameter.grad) for parameter in network.parameters())
    report = torch_offload.report()
    assert all(report.written_bytes[kind] > 0 for kind in ("parameter", "state"))


def test_computed_weights_are_not_paged(config):
    """What a module has for one call stays what it was, and nothing keeps it alive."""
    network = torch_offload.wrap(make_network(), config=config)
    computed = {name: weight * 2 for name, weight in network.named_parameters()}
    functional_call(network, computed, (rows(0),))
    assert not any(_C.is_managed(weight) for weight in computed.values())
    network(rows(0))
    labels = {label for label, _ in PROCESS.session.tensors()}
    assert labels == {"first.weight", "first.bias", "second.weight", "second.bias", "scale"}


def test_a_parameter_that_comes_inside_a_transform_is_paged_afterwards(config):
    """Nothing can be hooked there: the next ordinary call sees it."""
    network = torch_offload.wrap(make_network(), config=config)

    def grown(value):
        network.first._parameters["weight"] = replacement
        return network(value).square().mean()

    replacement = nn.Parameter(torch.eye(WIDTH))
    grad(grown)(rows(0))
    assert not _C.is_managed(replacement)
    network(rows(0)).sum().backward()
    assert _C.is_managed(replacement)
    assert _C.is_managed(replacement.grad)


def test_a_transform_of_a_checkpointed_module(config):
    """Both have their own rules for saved tensors."""

    def run(network):
        def loss(weights, value):
            return functional_call(network, weights, (value,)).square().mean()

        value = rows(0).requires_grad_()
        checkpoint(network, value, use_reentrant=False).square().mean().backward()
        return [grad(loss)(detached(network), rows(1)), [parameter.grad for parameter in network.parameters()]]

    expected = run(make_network())
    network = torch_offload.wrap(make_network(), config=config.replace(activations="page"))
    page_out(network)
    assert_bitwise_equal(run(network), expected)


class Differentiating(Network):
    """Its forward differentiates a part of itself, as networks for equations do."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        slope = vmap(grad(lambda row: torch.tanh(self.first(row)).sum()))(value)
        return super().forward(value) * slope


@pytest.mark.parametrize("activations", ["page", "keep"])
def test_a_transform_in_the_forward(config, activations):
    """Activations around it are paged as before."""

    def run(network):
        network(rows(0, 512)).square().mean().backward()
        return {name: parameter.grad for name, parameter in network.named_parameters()}

    torch.manual_seed(0)
    plain = Differentiating()
    paged = copy.deepcopy(plain)
    expected = run(plain)
    torch_offload.wrap(paged, config=config.replace(activations=activations))
    page_out(paged)
    assert_bitwise_equal(run(paged), expected)
    assert (torch_offload.report().counters["saved_bytes"] > 0) == (activations == "page")


def test_a_transform_that_is_captured(config):
    """`torch.compile` knows the function that forbids hooks on saved tensors, and knows it still."""

    def run(network):
        slope = torch.compile(
            lambda value: grad(lambda row: torch.tanh(network.first(row)).sum())(value), backend="eager", fullgraph=True
        )
        return slope(rows(0))

    expected = run(make_network())
    assert_bitwise_equal(run(torch_offload.wrap(make_network(), config=config)), expected)
