"""What autograd keeps for the backward pass leaves memory and comes back, and the numbers stay the same.

Method: small networks whose activations are larger than the budget, against plain torch; counters of the engine.
"""

import copy
import pickle

import pytest
import torch
from support.bits import digest, same_bits
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_offload
from torch_offload import Config, OutOfTierMemory
from torch_offload.runtime.process import PROCESS

WIDTH = 64
ROWS = 1024
BUDGET = "2MiB"


@pytest.fixture
def paged(config: Config) -> Config:
    """Activations are pages; 2 MiB."""
    return config.replace(ram=BUDGET, activations="page")


def deep_network() -> nn.Sequential:
    """Sixteen layers, each of which saves a quarter of the budget and more."""
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers)


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(network: nn.Module) -> dict[str, str]:
    return {name: digest(weight.grad) for name, weight in network.named_parameters()}


def plain_gradients() -> dict[str, str]:
    network = deep_network()
    network(rows()).square().mean().backward()
    return gradients(network)


def assert_activations_moved() -> None:
    """They left memory and came back."""
    report = torch_offload.report()
    assert report.written_bytes["activation"] > 0
    assert report.read_bytes["activation"] > 0


def test_activations_larger_than_the_budget_train(paged):
    """Where they are kept, they do not fit; as pages they leave and come back, and gradients are equal."""
    expected = plain_gradients()
    network = torch_offload.wrap(deep_network(), config=paged.replace(activations="keep"))
    with pytest.raises(OutOfTierMemory, match="activations"):
        network(rows())
    del network
    network = torch_offload.wrap(deep_network(), config=paged)
    for _ in range(3):
        network.zero_grad()
        network(rows()).square().mean().backward()
        assert gradients(network) == expected
    report = torch_offload.report()
    assert report.host_peak_bytes <= report.budget_bytes
    assert report.written_bytes["activation"] > 3 * report.budget_bytes
    assert report.read_bytes["activation"] > 3 * report.budget_bytes
    assert report.counters["saved_bytes"] >= 3 * 16 * 3 * ROWS * WIDTH * 4


def test_activations_leave_memory_by_default(config):
    """Method: a budget that they do not fit, and no setting but it; where they are kept the message names the mode."""
    expected = plain_gradients()
    small = config.replace(ram=BUDGET)
    assert "activations" not in small.model_fields_set
    network = torch_offload.wrap(deep_network(), config=small.replace(activations="keep"))
    with pytest.raises(OutOfTierMemory, match="let activations leave memory"):
        network(rows())
    del network
    network = torch_offload.wrap(deep_network(), config=small)
    network(rows()).square().mean().backward()
    assert gradients(network) == expected
    assert torch_offload.report().written_bytes["activation"] > torch_offload.report().budget_bytes


@pytest.mark.parametrize(
    ("activations", "remedy"),
    [
        ("keep", "raise `ram`, lower the batch size, or let activations leave memory (activations='page')"),
        ("page", "raise `ram`, lower the batch size, or recompute layers (activations='recompute')"),
        ("auto", "raise `ram`, lower the batch size, or recompute layers (activations='recompute')"),
    ],
)
def test_a_full_budget_names_what_helps_under_the_setting(config, activations, remedy):
    """Method: rows that no budget as small can hold."""
    network = torch_offload.wrap(deep_network(), config=config.replace(ram=BUDGET, activations=activations))
    with pytest.raises(OutOfTierMemory) as raised:
        network(torch.randn(64 * ROWS, WIDTH))
    assert str(raised.value).endswith(remedy)


def test_activations_that_fit_stay_in_memory(config):
    """Method: the same network with all the memory it wants: nothing is written, and gradients are equal."""
    expected = plain_gradients()
    network = torch_offload.wrap(deep_network(), config=config.replace(ram="256MiB"))
    for _ in range(2):
        network.zero_grad()
        network(rows()).square().mean().backward()
        assert gradients(network) == expected
    report = torch_offload.report()
    assert report.counters["saved_bytes"] > 0
    assert (report.ssd_written_bytes, report.ssd_read_bytes) == (0, 0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_and_their_inputs(paged, use_reentrant):
    """Both kinds, half of the layers checkpointed."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = deep_network()
            self.second = deep_network()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.first(value)
            for layer in self.second:
                value = checkpoint(layer, value, use_reentrant=use_reentrant)
            return value

    plain = Checkpointed()
    plain(rows()).square().mean().backward()
    expected = gradients(plain)
    network = torch_offload.wrap(Checkpointed(), ram="4MiB", config=paged)
    network(rows()).square().mean().backward()
    assert gradients(network) == expected
    assert_activations_moved()


class FirstChildCheckpointed(nn.Module):
    """Its hooks on saved tensors are in place during its forward, and not when backward calls the child again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = config_of_four()()
        self.head = deep_network()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, value, use_reentrant=False))


class SequentialCheckpointed(nn.Sequential):
    """Segments of its own children."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self, 4, value, use_reentrant=False)


@pytest.mark.parametrize(
    "make", [FirstChildCheckpointed, lambda: SequentialCheckpointed(*deep_network())], ids=["child", "sequential"]
)
def test_a_checkpointed_first_child(paged, make):
    """Without reentrance; three steps, and the rest of the module is paged as ever."""
    plain = make()
    plain(rows()).square().mean().backward()
    expected = gradients(plain)
    network = torch_offload.wrap(make(), config=paged.replace(ram="6MiB"))
    for _ in range(3):
        network.zero_grad()
        network(rows()).square().mean().backward()
        assert gradients(network) == expected
    assert torch_offload.report().counters["saved_bytes"] > 0


def test_hooks_of_others_stay_in_place(paged):
    """A checkpoint around the module, and hooks on saved tensors that the script has put in place."""

    def run(network: nn.Module) -> list[object]:
        seen = []
        with saved_tensors_hooks(lambda tensor: seen.append(digest(tensor)) or tensor, lambda tensor: tensor):
            network(rows()).square().mean().backward()
        checkpoint(network, rows().requires_grad_(), use_reentrant=False).square().mean().backward()
        return [seen, gradients(network)]

    expected = run(config_of_four()())
    assert run(torch_offload.wrap(config_of_four()(), config=paged.replace(ram="6MiB"))) == expected
    assert len(expected[0]) > 4


def test_a_graph_that_is_kept_is_walked_again(paged):
    """retain_graph, and a gradient of a gradient."""

    def twice(network: nn.Module) -> dict[str, str]:
        loss = network(rows()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        weights = list(network.parameters())
        first = torch.autograd.grad(network(rows()[:64]).square().mean(), weights, create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        return gradients(network)

    small = config_of_four()
    expected = twice(small())
    assert twice(torch_offload.wrap(small(), config=paged)) == expected
    assert_activations_moved()


def config_of_four():
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    return make


def test_a_change_in_place_is_torchs_error(paged):
    """What was saved is not what would be used."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            root = self.linear(value).exp()
            root.add_(1)
            return root

    network = torch_offload.wrap(Changing(), config=paged)
    loss = network(rows()).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[.*\] is at version 1; expected"):
        loss.backward()


def test_what_a_graph_kept_goes_with_it(paged):
    """Used or dropped."""
    network = torch_offload.wrap(deep_network(), config=paged)
    before = PROCESS.session.engine.managed_count()
    loss = network(rows()).sum()
    assert PROCESS.session.engine.managed_count() > before + 16
    del loss
    assert PROCESS.session.engine.managed_count() == before
    network(rows()).sum().backward()
    network.zero_grad()
    assert PROCESS.session.engine.managed_count() == before


def test_hooks_end_with_the_call(paged):
    """One that raises included; what is saved outside of the module is left alone."""
    network = torch_offload.wrap(deep_network(), config=paged)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        network(torch.randn(3, 3))
    before = PROCESS.session.engine.managed_count()
    outside = torch.randn(ROWS, WIDTH, requires_grad=True)
    kept = outside.exp().exp()
    assert PROCESS.session.engine.managed_count() == before
    kept.sum().backward()


def test_copies_of_the_module_are_ordinary(paged):
    """A deep copy and a pickle run without effect on the engine."""
    network = torch_offload.wrap(config_of_four()(), config=paged)
    copied = copy.deepcopy(network)
    stored = pickle.dumps(network)
    torch_offload.unwrap(network)
    restored = pickle.loads(stored)
    expected = network(rows())
    assert same_bits(copied(rows()), expected)
    assert same_bits(restored(rows()), expected)
