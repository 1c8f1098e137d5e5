"""Whatever a run can do is planned as it runs: recomputed layers, adapters, evaluations, generations, 8-bit moments.

Method: small models planned on the meta device, then run, with the engine's counters beside the plan; plans of which
only one thing differs, beside each other. A made-up machine, so that nothing depends on this one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.figures import MACHINE
from support.isolation import in_child
from support.models import tiny_config, tiny_model
from support.planned_steps import PAGE, batch_of, counted_per_step, least_per_step, plan_of, settings, training_step
from torch import nn
from transformers import AutoModelForCausalLM

import torch_offload
from torch_offload import ConfigError, OffloadError
from torch_offload.activations.recompute import is_recomputed, layers_of
from torch_offload.integrations.trained_parts import TrainedParts
from torch_offload.planning.fake_trace import What, record
from torch_offload.planning.page_uses import StepShape, StepUses, state_bytes_of

pytestmark = pytest.mark.any_torch

SLOW_DISK = MACHINE.model_copy(update={"ssd_read": 1e7, "ssd_write": 1e7, "ssd_mixed": 1e7})
FAST_DISK = MACHINE.model_copy(update={"ssd_read": 1e13, "ssd_write": 1e13, "ssd_mixed": 1e13})


def empty_model(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        configuration = tiny_config("llama", tied=False, hidden=256, layers=8)
        for name, value in changes.items():
            setattr(configuration, name, value)
        return AutoModelForCausalLM.from_config(configuration).train()


def adapted(model: nn.Module) -> nn.Module:
    return TrainedParts.of("lora:r=4,targets=q_proj+v_proj").apply(model)


def weights_of(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


# --- Activations -------------------------------------------------------------------------------------------------


def trained_with(mode: str, ram: int, scratch: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return what was planned, what was counted, and the least for the engine's own list of uses."""
    torch.set_num_threads(1)
    config = settings(ram, scratch, activations=mode)
    plan = plan_of(empty_model(), batch_of(), config)
    model = tiny_model("llama", tied=False, hidden=256, layers=8)
    torch_offload.wrap(model, config=config)
    planned = {
        "ssd_read": sum(plan.ssd_read.values()),
        "ssd_written": sum(plan.ssd_written.values()),
        "peak": plan.peak_bytes["ram"],
    }
    step = training_step(model)
    return planned, counted_per_step(step), least_per_step(step, ram)


@pytest.mark.parametrize("mode", ["keep", "page", "recompute"])
def test_each_way_with_activations_moves_what_was_planned(mode, scratch):
    """A plan lies between what the best eviction moves for the engine's own uses and what the engine moves."""
    planned, counted, least = in_child(trained_with, mode, 40 << 20, str(scratch))
    for name in ("ssd_read", "ssd_written"):
        assert least[name] > 20 << 20
        assert 0.98 * least[name] < planned[name] < 1.02 * counted[name], (name, planned, counted, least)
    assert planned["peak"] == pytest.approx(counted["peak"], rel=0.02)


def test_recomputed_layers_need_less_memory_and_more_time():
    """Than the same with activations kept; the module is as before."""
    model = empty_model()
    kept, again = (plan_of(model, batch_of(), settings("1GiB", activations=mode)) for mode in ("keep", "recompute"))
    assert again.peak_bytes["ram"] < kept.peak_bytes["ram"] - (5 << 20)
    assert again.predicted_seconds > 1.1 * kept.predicted_seconds
    assert again.activations is not None
    assert again.activations.recomputed == sorted(name for name, _ in layers_of(model))
    assert not any(is_recomputed(layer) or layer.gradient_checkpointing for _, layer in layers_of(model))
    assert "gradient_checkpointing" not in vars(dict(layers_of(model))["model.layers.0"])
    assert kept.activations is None


def test_a_module_without_such_layers_cannot_recompute():
    with pytest.raises(ConfigError, match="activations='recompute': Linear has no layers"):
        plan_of(nn.Linear(64, 64), {"input": torch.randn(4, 64)}, settings("1MiB", activations="recompute"))


@pytest.mark.parametrize(("machine", "recomputes"), [(SLOW_DISK, True), (FAST_DISK, False)])
def test_auto_recomputes_where_the_disk_is_slower_than_computing(machine, recomputes):
    """Method: one budget in which activations move, a disk that takes hours and one that takes no time."""
    config = settings("40MiB", activations="auto")
    paged = plan_of(empty_model(), batch_of(rows=16), config.replace(activations="page"), probe=machine)
    plan = plan_of(empty_model(), batch_of(rows=16), config, probe=machine)
    assert plan.activations is not None
    chosen = plan.activations.recomputed
    assert bool(chosen) == recomputes
    assert len(chosen) + len(plan.activations.paged) == 8
    assert plan.activations.explanation.startswith(f"{len(chosen)} of 8 layers are recomputed: a step would wait")
    assert (plan.predicted_seconds < paged.predicted_seconds) == recomputes
    assert (plan.ssd_written.get("activation", 0) < paged.ssd_written["activation"]) == recomputes
    assert plan.activations.explanation in json.dumps(plan.to_dict())


def test_the_layers_of_a_recording_are_those_of_its_forward():
    """Calls of all layers are a part of the forward's; what they save is a part of what is saved."""
    model = empty_model()
    layers = dict(layers_of(model))
    recording = record(model, batch_of(), layers=layers)
    assert recording.layers.keys() == layers.keys()
    one = recording.layers["model.layers.0"]
    assert 0 < 8 * one.calls.total() < recording.calls["forward"].total()
    saved = {m.subject for m in recording.moments if m.what is What.save}
    assert 0 < len(one.saved_bytes) < len(saved)
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in layers.values())


def test_activations_that_stay_on_the_host_are_not_sent_further():
    """As pages they reach the SSD from the same memory."""
    config = settings("30MiB", gpu="16MiB", emulation={"gpu": True}, activations="ram")
    stays = plan_of(empty_model(), batch_of(rows=16), config)
    leaves = plan_of(empty_model(), batch_of(rows=16), config.replace(activations="page"))
    assert "activation" not in stays.ssd_written
    assert leaves.ssd_written["activation"] > 0
    assert stays.needed_bytes["ram"] > leaves.needed_bytes["ram"]


def test_the_remedy_says_what_would_do_if_activations_left():
    config = settings("24MiB", activations="recompute")
    plan = plan_of(empty_model(), batch_of(rows=64), config)
    assert not plan.fits
    assert "let activations leave memory (activations='page'): then" in str(plan.remedy)


# --- What trains -------------------------------------------------------------------------------------------------


def test_adapters_over_a_frozen_base_are_planned_as_peft_makes_them():
    """The base has neither gradients nor states and writes nothing; in bf16 PEFT has adapters in fp32."""
    base = empty_model()
    base_bytes = weights_of(base)
    model = adapted(base)
    adapter_bytes = sum(weight.numel() * 4 for weight in model.parameters() if weight.requires_grad)
    assert adapter_bytes == 8 * 4 * (256 + 256 + 256 + 128) * 4  # layers, rank, inputs and outputs of both
    plan = plan_of(model, batch_of(), settings(base_bytes // 2))
    assert (
        plan.state_bytes - sum(b.numel() * b.element_size() for b in model.buffers()) == base_bytes + 4 * adapter_bytes
    )
    assert plan.ssd_read["parameter"] > base_bytes // 2
    assert plan.ssd_written.get("parameter", 0) <= adapter_bytes
    half = adapted(empty_model().to(torch.bfloat16))
    assert {weight.dtype for weight in half.parameters() if weight.requires_grad} == {torch.float32}


def adapters_run(folder: str, scratch: str, ram: int) -> tuple[dict[str, int], dict[str, int], int]:
    torch.set_num_threads(1)
    config = settings(ram, scratch, activations="recompute")
    base = empty_model()
    loaded = list(base.parameters())
    plan = plan_of(adapted(base), batch_of(), config, loaded=loaded)
    planned = {"ssd_read": sum(plan.ssd_read.values()), "ssd_written": sum(plan.ssd_written.values())}
    planned |= {"peak": plan.peak_bytes["ram"], "file": plan.peak_bytes["ssd"]}
    with torch_offload.loading(config=config) as block:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = block.wrap(get_peft_model(model, adapters))
    return planned, counted_per_step(training_step(model.train())), plan.placement["checkpoint"]["parameter"]


@pytest.fixture
def saved(tmp_path):
    tiny_model("llama", tied=False, hidden=256, layers=8).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_frozen_base_from_a_checkpoint_takes_no_scratch_file(saved, scratch):
    """Its pages lie in the checkpoint, in the plan as in the run; of a copy they would be on the disk twice."""
    base_bytes = weights_of(empty_model())
    planned, counted, at_home = in_child(adapters_run, str(saved), str(scratch), 16 << 20)
    assert planned["ssd_read"] == pytest.approx(counted["ssd_read"], rel=0.2)
    assert planned["file"] < base_bytes // 4
    assert counted["file"] < base_bytes // 4
    assert at_home > base_bytes // 4
    base = empty_model()
    loaded = list(base.parameters())
    config = settings("16MiB", checkpoint_pages="copy", activations="recompute")
    copied = plan_of(adapted(base), batch_of(), config, loaded=loaded)
    assert copied.peak_bytes["ssd"] > base_bytes // 2
    assert "checkpoint" not in copied.placement
    assert "lie in its file" in str_of_table(plan_of(base, batch_of(), settings("16MiB"), loaded=loaded))


def str_of_table(plan: torch_offload.Plan) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(plan)
    return captured.get()


def test_the_last_layers_train():
    plan = plan_of(TrainedParts.of("layers:2").apply(empty_model()), batch_of(), settings("1GiB"))
    whole = plan_of(empty_model(), batch_of(), settings("1GiB"))
    assert plan.placement["ram"]["gradient"] < whole.placement["ram"]["gradient"] // 3
    assert plan.predicted_seconds < whole.predicted_seconds
    layer_bytes = sum(w.numel() * 4 for w in empty_model().model.layers[0].parameters())
    assert plan.placement["ram"]["state"] == 2 * 2 * layer_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora:r=0", "train: the rank r of lora must be a whole number of at least 1, got '0' in 'lora:r=0'"),
        ("lora", "train: lora needs its rank, such as lora:r=16, got 'lora'"),
        ("lora:rank=4", "train: lora takes r and targets, got 'rank=4'"),
        ("layers:x", "train: layers must be a whole number of at least 1, got 'x'"),
        ("layer:4", "train: did you mean layers?"),
        ("all", "train: expected full, lora:r=16"),
    ],
)
def test_what_trains_is_said_in_one_of_three_forms(text, message):
    with pytest.raises(ConfigError) as caught:
        TrainedParts.of(text)
    assert message in str(caught.value)


def test_more_layers_than_there_are_and_unknown_targets_are_refused():
    with pytest.raises(ConfigError, match="train: the model has 8 layers, got layers:9"):
        TrainedParts.of("layers:9").apply(empty_model())
    with pytest.raises(ConfigError, match=r"train: PEFT finds nothing to adapt .* name targets among .*down_proj"):
        TrainedParts.of("lora:r=4,targets=nothing").apply(empty_model())


def test_moments_in_8_bits_are_a_byte_each():
    """Method: the plan's bytes of each state beside those of an optimizer that has made them."""
    weight = nn.Parameter(torch.randn(96, 96).to(torch.bfloat16))
    weight.grad = torch.randn_like(weight)
    optimizer = torch_offload.AdamW([weight], moments="8bit")
    optimizer.step()
    bytes_of = {name: state.nbytes for name, state in optimizer.state[weight].items() if name != "step"}
    (size,) = record(Half(weight), {"value": torch.randn(4, 96).to(torch.bfloat16)}).parameters
    planned = {name: count * 9216 for name, count in state_bytes_of(size, "torch_offload.AdamW", "8bit").items()}
    assert planned.keys() == bytes_of.keys()
    assert all(planned[name] == pytest.approx(bytes_of[name], rel=0.12) for name in planned)  # whole blocks of 2,048
    with pytest.raises(ConfigError, match=r"moments: 8bit are torch_offload\.AdamW's"):
        plan_of(empty_model(), batch_of(), settings("1GiB"), moments="8bit")
    with pytest.raises(ConfigError, match="moments: '4bit' are not known"):
        plan_of(empty_model(), batch_of(), settings("1GiB"), moments="4bit", optimizer="torch_offload.AdamW")


class Half(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (value @ self.weight).float().square().mean()


def test_processes_share_memory_and_disk():
    """Two of them have half each, and say so."""
    model = empty_model()
    one, both = (plan_of(model, batch_of(), settings("80MiB"), processes=count) for count in (1, 2))
    alone = plan_of(model, batch_of(), settings("40MiB"))
    assert (both.budget_bytes["ram"], both.budget_bytes["ssd"]) == (40 << 20, 512 << 20)
    assert (both.ssd_read, both.peak_bytes) == (alone.ssd_read, alone.peak_bytes)
    assert both.resource_seconds["ssd"] == pytest.approx(2 * alone.resource_seconds["ssd"])
    assert (one.processes, both.processes) == (1, 2)
    assert "2 share this machine" in str_of_table(both)


def test_moving_pages_costs_the_processor_time():
    """Beside computing; of a step that moves nothing it costs nothing."""
    model = empty_model()
    moves, stays = (plan_of(model, batch_of(), settings(ram), probe=FAST_DISK) for ram in ("40MiB", "1GiB"))
    assert stays.paging_seconds == 0
    read_gb, written_gb = (sum(way.values()) / 1e9 for way in (moves.ssd_read, moves.ssd_written))
    assert moves.paging_seconds == pytest.approx(0.3 * read_gb + 0.1 * written_gb)
    assert moves.predicted_seconds - stays.predicted_seconds == pytest.approx(moves.paging_seconds)


# --- Without gradients -------------------------------------------------------------------------------------------


def forward_run(folder: str, scratch: str, work: str) -> tuple[dict[str, int], dict[str, int]]:
    torch.set_num_threads(1)
    config = settings(10 << 20, scratch)
    empty = empty_model()
    options: dict[str, Any] = {"work": work, "loaded": list(empty.parameters())}
    options |= {"new_tokens": 6} if work == "generate" else {}
    batch = batch_of(rows=1, tokens=16)
    plan = plan_of(empty, batch, config, **options)
    assert empty.training
    model = torch_offload.from_pretrained(AutoModelForCausalLM, folder, config=config, dtype=torch.float32).eval()

    def step() -> None:
        with torch.no_grad():
            if work == "evaluate":
                model(**batch, use_cache=False)
                return
            model.generate(batch["input_ids"], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)

    planned = {"ssd_read": sum(plan.ssd_read.values()), "ssd_written": sum(plan.ssd_written.values())}
    planned |= {"peak": plan.peak_bytes["ram"], "file": plan.peak_bytes["ssd"]}
    return planned, counted_per_step(step) | {"written_in_all": torch_offload.report().ssd_written_bytes}


@pytest.mark.parametrize("work", ["evaluate", "generate"])
def test_passes_without_gradients_read_what_was_planned(work, saved, scratch):
    planned, counted = in_child(forward_run, str(saved), str(scratch), work)
    assert counted["ssd_read"] > 10 << 20
    assert planned["ssd_read"] == pytest.approx(counted["ssd_read"], rel=0.15)
    assert planned["ssd_written"] == 0
    assert planned["file"] < 1024  # buffers, which no checkpoint has
    assert counted["written_in_all"] == counted["file"] <= 3 * PAGE  # each page once, in whichever pass it first leaves
    assert planned["peak"] == pytest.approx(counted["peak"], rel=0.05)


def test_a_generation_is_its_prompt_and_a_pass_for_each_further_token():
    """All tokens after the first move the same; keys and values take memory."""
    config, batch = settings("10MiB"), batch_of(rows=2, tokens=16)
    one, few, many = (plan_of(empty_model(), batch, config, work="generate", new_tokens=n) for n in (1, 5, 41))
    assert [phase.name for phase in many.phases] == ["prompt", "40 tokens"]
    assert [phase.name for phase in one.phases] == ["prompt"]
    each = (sum(many.ssd_read.values()) - sum(few.ssd_read.values())) / 36
    assert each == pytest.approx((sum(few.ssd_read.values()) - sum(one.ssd_read.values())) / 4, rel=0.1)
    assert each < weights_of(empty_model())  # a pass reads no weight twice, and the prompt's pass is not in it
    assert many.tokens_per_step == 82
    assert many.needed_bytes["ram"] > few.needed_bytes["ram"]
    assert str(many).startswith("generation")


def test_what_cannot_be_generated_is_refused():
    model, config = empty_model(), settings("10MiB")
    for options, message in (
        ({"work": "generate"}, "new_tokens: must be at least 1 to generate, got None"),
        ({"work": "generate", "new_tokens": 0}, "new_tokens: must be at least 1 to generate, got 0"),
        ({"new_tokens": 4}, "new_tokens: 4 are for work='generate', got work='train'"),
        ({"work": "dream"}, "work: expected train, evaluate or generate, got 'dream'"),
        ({"processes": 0}, "processes: must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            plan_of(model, batch_of(), config, **options)
        assert message in str(caught.value)
    with pytest.raises(OffloadError, match=r"a generation begins with tokens: give input_ids"):
        plan_of(model, {"labels": torch.ones(1, 4)}, config, work="generate", new_tokens=2)


def test_a_table_that_does_not_train_is_read_by_rows():
    """Of a vocabulary of which some rows are looked up, some pages are read; they are not there at once."""
    model = empty_model(vocab_size=32768)
    recording = record(TrainedParts.of("layers:1").apply(model), batch_of(rows=1, tokens=4))
    assert next(p for p in recording.parameters if "embed_tokens" in p.name).is_table
    shape = StepShape(page_elements=PAGE, min_paged_bytes=0, optimizer=None)
    uses = list(StepUses(recording, shape).events(steps=1))
    table = set(range(32768 * 256 // PAGE))  # the first parameter
    read = [use.page for use in uses if use.page in table and use.use.value == "read"]
    assert len(read) == 4
    assert len({use.group for use in uses if use.page in read and use.use.value == "read"}) == 4
    plan = plan_of(model, batch_of(rows=1, tokens=4), settings("8MiB"))
    assert plan.needed_bytes["ram"] < 32768 * 256 * 4 * 3  # the head comes whole, the table does not


def test_a_plan_is_written_to_a_file_that_a_run_takes(tmp_path: Path, scratch):
    """Its report then has both; a file that is none is refused before anything is paged."""
    plan = plan_of(empty_model(), batch_of(), settings("40MiB"))
    plan.write_json(tmp_path / "plan.json")
    model = tiny_model("llama", tied=False, hidden=256, layers=8)
    config = settings("40MiB", str(scratch), plan=tmp_path / "plan.json")
    torch_offload.wrap(model, config=config)
    step = training_step(model)
    for _ in range(4):
        step()
    comparison = torch_offload.report().comparison
    assert comparison is not None
    by_name = {figure.name: figure for figure in comparison.figures}
    assert by_name["SSD read"].predicted == sum(plan.ssd_read.values())
    assert 0.5 < by_name["SSD read"].predicted / by_name["SSD read"].measured < 1.5
    torch_offload.unwrap(model)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.json is not a plan that this version wrote"):
        torch_offload.wrap(model, config=config)
