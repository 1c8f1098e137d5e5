"""A plan foretells what the engine moves, needs no memory for the model, and says exactly what is missing.

Method: small models planned on the meta device, then trained, with the engine's counters beside the plan; modules of a
few layers whose needs can be counted by hand; a made-up machine, so that nothing depends on this one.
"""

import itertools
import json
import resource
import types
from collections import Counter
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.figures import MACHINE
from support.isolation import in_child
from support.models import tiny_config, tiny_model
from support.planned_steps import PAGE, Layers, batch_of, plan_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_offload
from torch_offload import Config, ConfigError, OffloadError
from torch_offload.planning import operator_costs
from torch_offload.planning.fake_trace import What, record
from torch_offload.planning.operator_calls import is_passing, tensor_shapes, tensors_in
from torch_offload.planning.page_uses import StepShape, StepUses, UpdateTier
from torch_offload.planning.planner import PlanInputs
from torch_offload.planning.step_time import Phase, Rates, rates_of, ssd_seconds, total_by_kind
from torch_offload.planning.tier_traffic import Budgets, traffic_of
from torch_offload.runtime.process import PROCESS

STEPS = 7
TOKENS = 16
COUNTED_FROM = 4
LINKS = ("ssd_read", "ssd_written", "to_device", "to_host")


# --- Beside the engine -------------------------------------------------------------------------------------------


def compared(case: str, scratch: str, device_share: float, ram_share: float) -> dict[str, tuple[float, float]]:
    """Return what the plan says and the engine counts of each link in a steady step, in bytes."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    configuration = tiny_config("llama", tied=False, hidden=256, layers=8)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(configuration, dtype=dtype).train()
    own = "own" in case
    update = "backward" if "backward" in case else "step"
    state_bytes = sum(weight.numel() for weight in empty.parameters()) * (14 if own else 4 * dtype.itemsize)
    config = Config(
        ram=int(ram_share * state_bytes), ssd=scratch, min_paged_bytes=0, page_elements=2 * PAGE, update=update
    )
    if device_share:
        config = config.replace(gpu=int(device_share * state_bytes), emulation={"gpu": True})
    micro_batches = 2 if "accumulate" in case else 1
    name = "torch_offload.AdamW" if own else "adamw_torch_fused"
    plan = plan_of(empty, batch_of(rows=1, tokens=TOKENS), config, optimizer=name, micro_batches=micro_batches)
    model = tiny_model("llama", tied=False, hidden=256, layers=8, dtype=dtype)
    torch_offload.wrap(model, config=config)
    optimizer = torch_offload.AdamW(model.parameters()) if own else torch.optim.AdamW(model.parameters(), fused=True)
    return measured_beside(plan, model, optimizer, micro_batches)


def measured_beside(plan: torch_offload.Plan, model: nn.Module, optimizer: Any, micro_batches: int) -> Any:
    counts = []
    for _ in range(STEPS):
        for _ in range(micro_batches):
            model(**batch_of(rows=1, tokens=TOKENS)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(counters())
    span = STEPS - COUNTED_FROM
    counted = {link: (counts[-1][link] - counts[COUNTED_FROM - 1][link]) / span for link in LINKS}
    return {link: (sum(getattr(plan, link).values()), counted[link]) for link in LINKS}


def counters() -> dict[str, int]:
    report = torch_offload.report()
    links: dict[str, int] = {"ssd_read": report.ssd_read_bytes, "ssd_written": report.ssd_written_bytes}
    for name in ("to_device", "to_host"):
        links[name] = 0 if report.device is None else sum(getattr(report.device, f"{name}_bytes").values())
    return links


@pytest.mark.parametrize(
    ("case", "ram_share"), [("fp32", 0.35), ("fp32 accumulate", 0.55), ("bf16 own", 0.35), ("fp32 backward", 0.35)]
)
def test_two_tiers_move_what_was_planned(case, ram_share, scratch):
    """The plan is what perfect replacement moves; the engine comes near, on a small model and a busy machine."""
    links = in_child(compared, case, str(scratch), 0.0, ram_share)
    for name in ("ssd_read", "ssd_written"):
        planned, counted = links[name]
        assert 0.75 < planned / counted < 1.1, links
    assert links["to_device"] == (0, 0)


@pytest.mark.parametrize(("case", "ram_share"), [("fp32", 0.6), ("fp32 backward", 0.3)])
def test_three_tiers_move_what_was_planned(case, ram_share, scratch):
    """Between device and memory, both ways. To the SSD the engine moves more than has to be: the plan is below it.

    Where the device updates, by half: the host wrote what the device had newer bytes of, and that was above twice.
    """
    links = in_child(compared, case, str(scratch), 0.35, ram_share)
    for name in ("to_device", "to_host"):
        planned, counted = links[name]
        assert 0.75 < planned / counted < 1.1, links
    for name in ("ssd_read", "ssd_written"):
        planned, counted = links[name]
        assert 0 < planned < 1.1 * counted, links
    if case == "fp32 backward":
        planned, counted = (sum(links[name][k] for name in ("ssd_read", "ssd_written")) for k in range(2))
        assert counted < 1.8 * planned, links


def test_updates_of_the_backward_take_its_time():
    """And no gradient moves; clipping and accumulation, which they exclude, are refused."""
    config = Config(ram="64MiB", min_paged_bytes=0, page_elements=PAGE)
    late, early = (three_layers(config.replace(update=update)) for update in ("step", "backward"))
    seconds = [{phase.name: phase.resource_seconds["compute"] for phase in plan.phases} for plan in (late, early)]
    moved = seconds[0]["forward"] - seconds[1]["forward"]
    assert moved == pytest.approx(3 * WIDTH * WIDTH / MACHINE.update["adamw_torch_fused"])
    assert seconds[1]["backward"] - seconds[0]["backward"] == pytest.approx(moved)
    small = config.replace(ram=8 * LAYER_BYTES, update="backward")
    assert "gradient" not in three_layers(small).ssd_written
    assert three_layers(small.replace(update="step")).ssd_written["gradient"] > 0
    with pytest.raises(ConfigError, match="update: 'backward' applies gradients before their norm is known"):
        three_layers(small, max_grad_norm=1.0)
    with pytest.raises(ConfigError, match="update: 'backward' is for one backward per step, got micro_batches=2"):
        three_layers(small, micro_batches=2)


# --- What is recorded --------------------------------------------------------------------------------------------


def test_a_recording_frees_all_that_it_allocates():
    """Gradients alone stay, and parameters are used in the order of the layers and back."""
    recording = record(Layers(64, 32, 16), {"value": torch.randn(8, 64)})
    lives: dict[int, int] = {}
    for moment in recording.moments:
        if moment.what is What.allocate:
            lives[moment.subject] = moment.size_bytes
        elif moment.what is What.free:
            del lives[moment.subject]
    assert sorted(lives.values()) == [16 * 32 * 4, 32 * 64 * 4]
    used = [moment.parameters for moment in recording.moments if moment.parameters]
    assert used == [(0,), (1,), (1,)]  # the first layer needs no gradient of its input
    assert [m.subject for m in recording.moments if m.what is What.finish] == [1, 0]


class OperatorCounts(TorchDispatchMode):
    """Counts operators that take fractions, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not is_passing(func) and any(tensor.dtype.is_floating_point for tensor in tensors_in([args, kwargs])):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3", "gemma"])
def test_a_recording_has_the_operators_of_a_run(name):
    """No mask is made for attention, for example, that a run would do without. Method: both counted, of two rows."""
    model, batch = tiny_model(name, tied=True), batch_of(rows=2, tokens=TOKENS)
    recorded: Counter[str] = Counter()
    for calls in record(model, batch).calls.values():
        for call, count in calls.items():
            if any(shape.dtype.is_floating_point for shape in tensor_shapes((call.arguments, call.keywords))):
                recorded[str(call.operator)] += count
    with OperatorCounts() as run:
        model(**batch).loss.backward()
    assert recorded == run.counts


def test_checkpointed_layers_are_used_again():
    """Checkpointing is found in the module itself."""

    class Checkpointed(Layers):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = value.requires_grad_()
            for layer in self.layers:
                value = checkpoint(lambda given, layer=layer: layer(given).tanh(), value, use_reentrant=False)
            return value.square().mean()

    recording = record(Checkpointed(64, 64, 64), {"value": torch.randn(8, 64)})
    used = [moment.parameters for moment in recording.moments if moment.parameters]
    assert used == [(0,), (1,), (1,), (1,), (0,), (0,)]


def test_tied_and_frozen_parameters():
    """Tied ones are one; a frozen one has neither gradient nor states."""
    model = Layers(64, 64, 64, 64)
    model.layers[1].weight = model.layers[0].weight
    model.layers[2].weight.requires_grad_(False)
    plan = plan_of(model, {"value": torch.randn(8, 64)}, Config(ram="1MiB", min_paged_bytes=0, page_elements=PAGE))
    assert plan.parameters == 2 * 64 * 64
    assert plan.state_bytes == (4 + 1) * 64 * 64 * 4


def test_the_module_stays_as_it_is():
    model = Layers(64, 64)
    before = {name: (id(weight), weight.clone()) for name, weight in model.named_parameters()}
    record(model, {"value": torch.randn(8, 64)})
    assert {name: id(weight) for name, weight in model.named_parameters()} == {n: b[0] for n, b in before.items()}
    assert all(same_bits(weight, before[name][1]) for name, weight in model.named_parameters())
    assert model.layers[0].weight.grad is None


def test_a_forward_that_depends_on_numbers_is_refused():
    class Deciding(Layers):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.layers[0](value)
            return value.mean() if value.sum() > 0 else value.sum()

    with pytest.raises(OffloadError, match="the forward of Deciding depends on numbers"):
        record(Deciding(64, 64), {"value": torch.randn(8, 64)})


def test_what_torch_cannot_follow_is_refused():
    """Such as products of experts in float32, with some versions. Here one that has no shape at all."""

    class Unknown(Layers):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.layers[0](value) @ torch.ones(63, 1)

    with pytest.raises(OffloadError, match="cannot trace the forward and backward of Unknown"):
        record(Unknown(64, 64), {"value": torch.randn(8, 64)})


def test_a_module_without_a_loss_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", tied=True, hidden=64, layers=1))
    with pytest.raises(OffloadError, match="no loss to train on; give labels"):
        record(model, {"input_ids": torch.ones(1, 4, dtype=torch.long)})


def planned_without_memory() -> tuple[int, int]:
    """Plan a model of 7 GB; return its bytes and what the peak of this process grew by."""
    configuration = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=8, num_attention_heads=32
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32).train()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan = plan_of(model, batch_of(rows=1, tokens=TOKENS), Config(ram="8GiB"), ssd_bytes="1TiB")
    assert plan.fits
    assert sum(plan.ssd_read.values()) > 8 << 30
    return plan.state_bytes // 4, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def test_a_model_on_the_meta_device_is_never_there():
    model_bytes, grown_bytes = in_child(planned_without_memory)
    assert model_bytes > 7e9
    assert grown_bytes < 0.1 * model_bytes


# --- What does not fit -------------------------------------------------------------------------------------------

WIDTH = 256
LAYER_BYTES = WIDTH * WIDTH * 4
MIN_BYTES = 2 * LAYER_BYTES + 4 * PAGE * 4  # what wrap insists on: a layer, its gradient, four pages


def three_layers(config: Config, **options: Any) -> torch_offload.Plan:
    config = config.replace(min_paged_bytes=0, page_elements=PAGE)
    return plan_of(Layers(*[WIDTH] * 4), {"value": torch.randn(1, WIDTH)}, config, **options)


def test_a_budget_below_one_operator_lacks_the_difference():
    plan = three_layers(Config(ram=MIN_BYTES - 1000))
    assert (plan.fits, plan.missing_bytes) == (False, {"ram": 1000})
    assert plan.remedy == f"give a ram of at least {MIN_BYTES} bytes (576 KiB)"
    assert str(plan).startswith("does not fit: ram lacks 1000 bytes; give a ram of at least")
    assert three_layers(Config(ram=MIN_BYTES)).fits


def test_a_device_below_one_operator_lacks_the_difference():
    config = Config(ram="4MiB", gpu=MIN_BYTES - 1000, emulation={"gpu": True})
    assert three_layers(config).missing_bytes == {"device": 1000}
    small = config.replace(gpu="4MiB", ram=16 * PAGE * 4 - 1)
    assert three_layers(small).missing_bytes == {"ram": 1}


def test_a_disk_that_cannot_hold_the_state_lacks_the_difference():
    config = Config(ram=MIN_BYTES)
    needed_bytes = three_layers(config).needed_bytes["ssd"]
    assert 2 * LAYER_BYTES < needed_bytes <= 12 * LAYER_BYTES
    plan = three_layers(config, ssd_bytes=needed_bytes - 1)
    assert plan.missing_bytes == {"ssd": 1}
    assert plan.remedy == f"give a directory on a disk with {needed_bytes} bytes free ({needed_bytes / 2**20:.4g} MiB)"


def test_activations_that_do_not_fit_are_told_to_leave():
    """As pages they do; then they move."""
    model = Layers(*[64] * 17)
    batch = {"value": torch.randn(4096, 64)}
    config = Config(ram="6MiB", min_paged_bytes=0, page_elements=PAGE, activations="keep")
    kept = plan_of(model, batch, config)
    assert not kept.fits
    assert kept.missing_bytes["ram"] > 16 * 4096 * 64 * 4 - (6 << 20)
    assert "activations='page'" in str(kept.remedy)
    paged = plan_of(model, batch, config.replace(activations="page"))
    assert paged.fits
    assert paged.ssd_written["activation"] > 8 << 20


# --- What follows from it ----------------------------------------------------------------------------------------


def test_what_fits_in_memory_moves_nothing():
    plan = three_layers(Config(ram="16MiB"))
    assert (plan.ssd_read, plan.ssd_written, plan.needed_bytes["ssd"]) == ({}, {}, 0)
    assert plan.placement["ram"] == {
        "parameter": 3 * LAYER_BYTES,
        "gradient": 3 * LAYER_BYTES,
        "state": 6 * LAYER_BYTES,
    }
    assert plan.bottleneck == "compute"
    assert plan.endurance_years is None


def test_updates_on_the_host_spare_the_device_the_states():
    """Gradients go down once, weights come up after their update; states never cross."""
    recording = record(Layers(*[WIDTH] * 4), {"value": torch.randn(1, WIDTH)})
    budgets = Budgets(device=MIN_BYTES, ram=16 << 20)
    above, below = (traffic_of(StepUses(recording, step_shape(tier)), budgets) for tier in ("device", "host"))
    assert total_by_kind(phase.read for phase in above.link)["state"] > 0
    to_device = total_by_kind(phase.read for phase in below.link)
    assert set(to_device) == {"parameter"}
    assert to_device["parameter"] >= 3 * LAYER_BYTES
    assert total_by_kind(phase.written for phase in below.link) == {"gradient": 3 * LAYER_BYTES}
    assert [(phase.read, phase.written) for phase in below.ssd] == [({}, {})] * 2


def step_shape(update_tier: UpdateTier) -> StepShape:
    return StepShape(page_elements=PAGE, min_paged_bytes=0, optimizer="adamw_torch_fused", update_tier=update_tier)


def test_seconds_are_those_of_the_slowest_resource_of_each_phase():
    rates = Rates(ssd_read=1e9, ssd_write=2e9, ssd_mixed=1.5e9, to_device=10e9, to_host=5e9)
    assert ssd_seconds(3_000_000_000, 1_000_000_000, rates) == pytest.approx(2 / 1.5 + 2)
    phase = Phase(name="forward", compute_seconds=1.0, ssd_read={"state": 3_000_000_000}, to_host={"state": 10**10})
    busy = {"compute": 1.0, "host update": 0.0, "ssd": 3.0, "to device": 0.0, "to host": 2.0}
    assert phase.seconds_by_resource(rates) == busy
    assert phase.seconds(rates) == 3.0


def test_the_link_of_an_emulation_has_the_rate_it_is_set_to():
    rates = rates_of(Config(gpu="1GiB", emulation={"gpu": True, "link_rate": "3GB", "ssd_rate": "10MB"}), MACHINE)
    assert (rates.to_device, rates.to_host, rates.ssd_read, rates.ssd_mixed) == (3e9, 3e9, 1e7, 1e7)
    assert rates_of(Config(), MACHINE).to_device == 5e9


def test_a_plan_adds_up():
    plan = three_layers(Config(ram=MIN_BYTES), endurance_bytes="1TB", steps_per_day=1000)
    assert plan.predicted_seconds == pytest.approx(sum(phase.seconds for phase in plan.phases))
    assert plan.lower_bound_seconds == max(plan.resource_seconds.values()) <= plan.predicted_seconds
    written_bytes = sum(plan.ssd_written.values())
    assert plan.endurance_years == pytest.approx(1e12 / (1000 * written_bytes) / 365.25)
    assert plan.tokens_per_second == pytest.approx(plan.tokens_per_step / plan.predicted_seconds)
    said = json.loads(plan.to_json())
    assert said["ssd_bytes_per_day"] == pytest.approx(1000 * written_bytes)
    assert said["phases"][0]["name"] == "forward"


def test_operators_are_timed_where_there_is_time():
    """All of them, with real numbers; without time all are estimated."""
    batch, config = batch_of(rows=1, tokens=TOKENS), Config(ram="64MiB", min_paged_bytes=0, page_elements=PAGE)
    model = tiny_model("llama", tied=False)
    assert plan_of(model, batch, config, timing_seconds=60).timed_share == pytest.approx(1.0)
    assert plan_of(model, batch, config).timed_share == 0


def test_no_operator_costs_what_a_disturbed_moment_took(monkeypatch):
    """Five times in a row that are disturbed are not all those of one call."""
    batch, config = batch_of(rows=1, tokens=TOKENS), Config(ram="64MiB", min_paged_bytes=0, page_elements=PAGE)
    model = tiny_model("llama", tied=False)
    timings = itertools.count()

    def seconds_of(call, caches, *, warm_up):
        return 1.0 if 5 <= next(timings) < 10 else 0.001

    monkeypatch.setattr(operator_costs, "timed_seconds", seconds_of)
    monkeypatch.setattr(PROCESS, "operator_seconds", {})
    plan_of(model, batch, config, timing_seconds=60)
    assert len(PROCESS.operator_seconds) * 5 == next(timings)
    assert set(PROCESS.operator_seconds.values()) == {0.001}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "optimizer: 'adam' is not known; there are: adamw_torch_fused, torch_offload.AdamW"),
        ({"micro_batches": 0}, "micro_batches: must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_planned_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        three_layers(Config(ram="1MiB"), **options)


def test_a_gpu_that_is_not_there_is_refused():
    """It is planned with its own kernels and times (test_gpu_plan.py), never with the processor's."""
    with pytest.raises(ConfigError, match="gpu: torch sees no GPU"):
        plan_of(Layers(64, 64), {"value": torch.randn(4, 64)}, Config(ram="6MiB", gpu="1GiB"))


def test_pages_get_what_is_not_reserved():
    """The share of torch's own allocator counts for nothing else; an emulated GPU has no such share."""
    config = Config(gpu="4GiB", gpu_reserved="1GiB", ram="1GiB")
    assert config.compute_bytes == 3 << 30
    assert PlanInputs.budgets.fget(types.SimpleNamespace(config=config)).device == 3 << 30
    emulated = config.replace(emulation={"gpu": True})
    assert PlanInputs.budgets.fget(types.SimpleNamespace(config=emulated)).device == 4 << 30
