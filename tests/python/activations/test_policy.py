"""Which layers compute their activations again, that numbers stay the same, and that it is explained.

Method: the choice as a pure function with hypothesis; a tiny Llama against plain torch with its layers switched.
"""

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from support.bits import digest, same_bits
from support.models import VOCABULARY, tiny_model
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError
from torch_offload.activations.policy import FIRST_STEPS, MEASURED_STEPS, STEPS_OF_DRIFT, Totals
from torch_offload.activations.recompute import (
    LayerCost,
    StepTraffic,
    is_recomputed,
    layers_of,
    set_recomputed,
    worth_recomputing,
)
from torch_offload.runtime.process import PROCESS

pytestmark = pytest.mark.alone

DECIDED_STEPS = FIRST_STEPS + MEASURED_STEPS + STEPS_OF_DRIFT + 1
COSTS = some.lists(
    some.builds(
        LayerCost,
        name=some.text(max_size=3),
        seconds=some.floats(0.001, 1.0),
        saved_bytes=some.integers(0, 10**9),
    ),
    max_size=12,
)
TRAFFIC = some.builds(
    StepTraffic,
    compute_seconds=some.floats(0.01, 10.0),
    other_bytes=some.floats(0, 1e10),
    activation_bytes=some.floats(0, 1e10),
    bytes_per_second=some.floats(1e8, 1e10),
)


@given(costs=COSTS, traffic=TRAFFIC)
def test_a_choice_makes_a_step_shorter_or_is_empty(costs, traffic):
    """By the model that it rests on; a step that computes for longer than it moves is left alone."""
    chosen = worth_recomputing(costs, traffic)
    without = 2 * sum(cost.saved_bytes for cost in chosen)
    after = traffic.seconds(without_bytes=without, more_seconds=sum(cost.seconds for cost in chosen))
    moving = (traffic.other_bytes + traffic.activation_bytes) / traffic.bytes_per_second
    assert (after < traffic.seconds()) == bool(chosen)
    if moving <= traffic.compute_seconds:
        assert chosen == []


def test_the_cheapest_bytes_go_first():
    """A byte of the second layer costs a tenth; one layer is enough."""
    costs = [LayerCost("dear", 1.0, 10**9), LayerCost("cheap", 0.1, 10**9)]
    traffic = StepTraffic(compute_seconds=1.0, other_bytes=1e9, activation_bytes=4e9, bytes_per_second=2e9)
    assert [cost.name for cost in worth_recomputing(costs, traffic)] == ["cheap"]


def rows() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, steps: int, *, after_step=lambda step: None) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    losses = []
    for step in range(steps):
        loss = model(input_ids=rows(), labels=rows()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        after_step(step)
    return losses


def llama() -> nn.Module:
    return tiny_model("llama", tied=False, layers=6)


@pytest.mark.parametrize(("name", "ram"), [("llama", "6MiB"), ("gpt2", "12MiB")])
def test_recomputed_layers_give_the_same_numbers(config: Config, name: str, ram: str):
    """All of them, also where a cache of keys comes by position (GPT-2); unwrapping leaves them as they were."""
    plain, paged = (tiny_model(name, tied=False, layers=6) for _ in range(2))
    for model in (plain, paged):
        model.config._attn_implementation = "eager"  # refuses keys that are there twice
    torch.manual_seed(3)
    expected = train(plain, 4)
    torch.manual_seed(3)
    model = torch_offload.wrap(paged, config=config.replace(activations="recompute", ram=ram))
    layers = [layer for _, layer in layers_of(model)]
    assert len(layers) == 6
    assert all(is_recomputed(layer) for layer in layers)
    assert train(model, 4) == expected
    assert "every layer is recomputed" in str(torch_offload.report())
    torch_offload.unwrap(model)
    assert not any(layer.gradient_checkpointing for layer in layers)
    assert [digest(weight) for weight in model.parameters()] == [digest(weight) for weight in plain.parameters()]


def test_layers_that_switch_between_steps_give_the_same_numbers(config: Config):
    """A different half every step."""
    expected = train(llama(), 6)
    model = torch_offload.wrap(llama(), config=config.replace(activations="page", ram="4MiB"))

    def switch(step: int) -> None:
        for index, (_, layer) in enumerate(list(layers_of(model))):
            set_recomputed(layer, on=(index + step) % 2 == 0)

    assert train(model, 6, after_step=switch) == expected
    report = torch_offload.report()
    assert report.written_bytes["activation"] > 0
    assert report.read_bytes["activation"] > 0


@pytest.fixture
def slow_link(monkeypatch) -> None:
    """Time is that of a link of 20 MB/s, for which the program waits, and of a millisecond between two looks at it.

    Bytes are what really moved: what is decided does not depend on who else uses the machine.
    """
    real = Totals.now
    looks = itertools.count()

    def now(counters) -> Totals:
        counted = real(counters)
        stalled = (counted.activation_bytes + counted.other_bytes) / 20e6
        return replace(counted, stalled=stalled, seconds=stalled + 1e-3 * next(looks))

    monkeypatch.setattr(Totals, "now", now)


def test_auto_decides_and_explains(config: Config, slow_link):
    """A slow disk binds: layers are recomputed, fewer activations move, numbers stay.

    Before steps may be found to take another time than they did, and are measured again.
    """
    expected = train(llama(), DECIDED_STEPS)
    model = torch_offload.wrap(llama(), config=config.replace(activations="auto", ram="3MiB"))
    written: list[int] = []
    losses = train(
        model, DECIDED_STEPS, after_step=lambda _: written.append(torch_offload.report().written_bytes["activation"])
    )
    assert losses == expected
    report = torch_offload.report()
    assert report.activations.recomputed
    assert len(report.activations.recomputed) + len(report.activations.paged) == 6
    assert "a step waited" in report.activations.explanation
    assert "layers are recomputed" in str(report)
    assert written[-1] - written[-2] < written[3] - written[2]


def test_auto_decides_on_a_device(config: Config, slow_link):
    """What binds is its link, as long as memory has room for what comes down."""
    expected = train(llama(), DECIDED_STEPS)
    device = {"gpu": "4MiB", "emulation": {"gpu": True}, "ram": "64MiB"}
    model = torch_offload.wrap(llama(), config=config.replace(activations="auto", **device))
    assert train(model, DECIDED_STEPS) == expected
    report = torch_offload.report()
    assert report.written_bytes["activation"] == 0
    assert report.device.to_host_bytes["activation"] > 0
    assert report.activations.recomputed
    assert "a step waited" in report.activations.explanation


def test_auto_leaves_a_step_alone_that_does_not_wait(config: Config):
    """Everything fits."""
    model = torch_offload.wrap(llama(), config=config.replace(activations="auto", ram="256MiB"))
    train(model, 6)
    choice = torch_offload.report().activations
    assert choice.recomputed == []
    assert "traffic hides behind computing" in choice.explanation


def test_a_module_without_such_layers_is_refused(config: Config):
    """Only where everything was to be recomputed; nothing stays wrapped."""
    module = nn.Sequential(nn.Linear(256, 256))
    with pytest.raises(ConfigError, match="Sequential has no layers that transformers can checkpoint"):
        torch_offload.wrap(module, config=config.replace(activations="recompute"))
    assert PROCESS.session is None
    torch_offload.wrap(module, config=config.replace(activations="auto"))


def test_checkpointing_of_the_user_is_his(config: Config):
    """Layers that he switched on are neither counted nor switched off."""
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch_offload.wrap(model, config=config.replace(activations="auto", ram="4MiB"))
    train(model, 6)
    assert torch_offload.report().activations.recomputed == []
    torch_offload.unwrap(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_module_is_copied_and_pickled_while_it_is_measured(config: Config):
    """In the steps in which its layers carry hooks."""
    model = torch_offload.wrap(llama(), config=config.replace(activations="auto", ram="4MiB"))
    train(model, 3)
    copied = copy.deepcopy(model)
    stored = pickle.dumps(model)
    torch_offload.unwrap(model)
    expected = model(input_ids=rows()).logits
    assert same_bits(copied(input_ids=rows()).logits, expected)
    assert same_bits(pickle.loads(stored)(input_ids=rows()).logits, expected)


def test_auto_is_what_measurements_decide(config: Config):
    """`config="auto"` measures and explains like the setting, and the numbers stay those of plain torch."""
    plain = train(llama(), DECIDED_STEPS)
    model = torch_offload.wrap(llama(), ram="4MiB", ssd=config.ssd, config="auto")
    assert train(model, DECIDED_STEPS) == plain
    report = torch_offload.report()
    assert "a step" in report.activations.explanation
    assert report.ssd_read_bytes > 0
