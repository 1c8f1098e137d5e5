"""A plan for a GPU: its kernels and its times, its memory beside that of torch's own allocator.

Method: plans made where there is a GPU, the fake one, with the engine's counters on the same fake beside them; and the
counters that were recorded on a real one. The machine's rates are made up.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_gpu import in_gpu_child
from support.figures import GPU_MACHINE, MACHINE
from support.gpu_training import BareLlama, Shape
from support.models import tiny_model
from support.planned_steps import PAGE, Layers, batch_of, plan_of
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError, Plan
from torch_offload.diagnostics import compute_rates
from torch_offload.planning import call_timing
from torch_offload.planning.fake_trace import record
from torch_offload.planning.operator_calls import Call, tensor_shapes

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RECORDED = BENCHMARKS / "results" / "gpu_contact" / "gpu_training.json"
GPU = "cuda:0"
SHAPE = Shape(hidden=256, intermediate=512, layers=6, heads=4, vocabulary=512, has_fused_attention=False)
STEPS = 7
COUNTED_FROM = 4
LINKS = ("to_device", "to_host")
TRACED = ("llama", "gpt2", "bert", "gemma", "mixtral")
WIDTH = 128
ROWS = 8


def planned(model: nn.Module, batch: dict[str, Any], config: Config, **options: Any) -> Plan:
    return plan_of(model, batch, config, probe=GPU_MACHINE, **options)


# --- Beside the engine, and beside a GPU -------------------------------------------------------------------------


def compared(scratch: str, settings: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return what the plan says and the engine counts of the GPU's links in a steady step, in bytes."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        empty = BareLlama(SHAPE)
    state_bytes = 16 * sum(weight.numel() for weight in empty.parameters())
    reserved = 4 << 20
    sizes = {"gpu": int(0.35 * state_bytes) + reserved, "gpu_reserved": reserved, "ram": int(0.6 * state_bytes)}
    config = Config(**sizes, ssd=scratch, min_paged_bytes=4096, page_elements=2 * PAGE, **settings)
    ids = torch.randint(0, SHAPE.vocabulary, (2, 32))
    plan = planned(empty, {"ids": ids}, config)
    model = BareLlama(SHAPE)
    torch_offload.wrap(model, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    counts = []
    for _ in range(STEPS):
        model(ids.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        device = torch_offload.report().device
        counts.append({link: sum(getattr(device, f"{link}_bytes").values()) for link in LINKS})
    span = STEPS - COUNTED_FROM
    counted = {link: (counts[-1][link] - counts[COUNTED_FROM - 1][link]) / span for link in LINKS}
    return {link: (sum(getattr(plan, link).values()), counted[link]) for link in LINKS}


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "page", "optimizer_device": "gpu"},
        {"activations": "keep", "optimizer_device": "cpu"},
        {"activations": "ram", "optimizer_device": "gpu"},
    ],
    ids=str,
)
def test_its_links_move_what_was_planned(scratch, fake_gpu, settings):
    links = in_gpu_child(fake_gpu, compared, str(scratch), settings)
    for name in LINKS:
        plan, counted = links[name]
        assert 0.95 < plan / counted < 1.05, links


def plan_of_recorded_run(scratch: str) -> Plan:
    """Return the plan of what gpu_training.py trains."""
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_training

    run = gpu_training.Plan()
    with torch.device("meta"):
        model = BareLlama(run.shape).to(torch.bfloat16)
    ids = torch.ones(run.batch, run.sequence, dtype=torch.long)
    options = {"optimizer": "torch_offload.AdamW", "moments": "8bit", "max_grad_norm": 1.0, "ssd_bytes": "100GiB"}
    return planned(model, {"ids": ids}, run.config(scratch), **options)


def test_an_h100_moved_what_is_planned(scratch, fake_gpu):
    """7 B parameters in 24 GiB: the bytes of each link in the recorded steps, and that it fits."""
    plan = in_gpu_child(fake_gpu, plan_of_recorded_run, str(scratch))
    paged = [turn["turns"]["paged"] for turn in json.loads(RECORDED.read_text())["rounds"]]
    assert plan.fits
    assert (plan.ssd_read, plan.ssd_written) == ({}, {})
    assert {turn["ssd"] for turn in paged} == {0}
    for link in LINKS:
        counted = sorted(turn[link.replace("_", " ")] for turn in paged)[len(paged) // 2]
        assert 0.97 < sum(getattr(plan, link).values()) / counted < 1.03
    moved_bytes = sum(plan.to_device.values())
    assert plan.resource_seconds["to device"] == pytest.approx(moved_bytes / GPU_MACHINE.gpu.to_device)
    products = 8 * plan.parameters * plan.tokens_per_step / GPU_MACHINE.gpu.gemm["bfloat16"]  # the forward runs twice
    assert products < plan.resource_seconds["compute"] < 3 * products


# --- Its memory --------------------------------------------------------------------------------------------------


def layers_in(reserved: int, **options: Any) -> Plan:
    config = Config(gpu=reserved + (4 << 20), gpu_reserved=reserved, ram="16MiB", min_paged_bytes=0, page_elements=PAGE)
    return planned(Layers(*[WIDTH] * 5), {"value": torch.randn(ROWS, WIDTH)}, config, **options)


def plans_with_little_reserved() -> tuple[Plan, Plan]:
    return layers_in(4096, work="evaluate"), layers_in(1 << 20, work="evaluate")


def test_what_is_no_page_needs_what_is_reserved(fake_gpu):
    """What is squared, its squares and their mean, at once; not of the pages' budget."""
    little, enough = in_gpu_child(fake_gpu, plans_with_little_reserved)
    needed_bytes = 2 * ROWS * WIDTH * 4 + 4
    assert little.needed_bytes["reserved"] == enough.needed_bytes["reserved"] == needed_bytes
    assert little.missing_bytes == {"reserved": needed_bytes - 4096}
    assert little.remedy.startswith(f"give a gpu_reserved of at least {needed_bytes} bytes")
    assert enough.fits
    assert enough.budget_bytes["device"] == 4 << 20
    assert "reserved" in little.to_json()
    assert enough.peak_bytes["device"] == 4 * WIDTH * WIDTH * 4


def plan_with_small_gpu() -> Plan:
    config = Config(gpu=(1 << 20) + 4096, gpu_reserved=1 << 20, ram="16MiB", min_paged_bytes=0, page_elements=PAGE)
    return planned(Layers(*[WIDTH] * 3), {"value": torch.randn(ROWS, WIDTH)}, config)


def test_the_remedy_for_few_pages_is_what_gpu_has_to_be(fake_gpu):
    """With what is reserved of it."""
    plan = in_gpu_child(fake_gpu, plan_with_small_gpu)
    assert set(plan.missing_bytes) == {"device"}
    needed_bytes = plan.needed_bytes["device"] + (1 << 20)
    assert plan.remedy.startswith(f"give a gpu of at least {needed_bytes} bytes")


# --- Its kernels and its times -----------------------------------------------------------------------------------


def trace_models() -> dict[str, list[str]]:
    """Return where the operators of each model compute, as far as they have fractions."""
    found = {}
    for name in TRACED:
        batch = batch_of(rows=2, tokens=8) | {"attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3])}
        recording = record(tiny_model(name, tied=False).train(), batch, device=GPU)
        calls = [call for phase in recording.calls.values() for call in phase]
        found[name] = sorted({str(shape.device) for call in calls for shape in shapes_of(call)})
    return found


def shapes_of(call: Any) -> list[Any]:
    return [shape for shape in tensor_shapes((call.arguments, call.keywords)) if shape.size]


def test_models_are_traced_where_they_will_compute(fake_gpu):
    """Masks, positions and lengths too, though these have numbers."""
    assert in_gpu_child(fake_gpu, trace_models) == {name: ["cuda:0"] for name in TRACED}


def generation_of(scratch: str) -> Plan:
    config = Config(gpu="4MiB", gpu_reserved="2MiB", ram="4MiB", ssd=scratch, min_paged_bytes=0, page_elements=PAGE)
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    return planned(tiny_model("llama", tied=False), batch, config, work="generate", new_tokens=3)


def test_a_generation_is_planned(scratch, fake_gpu):
    plan = in_gpu_child(fake_gpu, generation_of, str(scratch))
    assert [phase.name for phase in plan.phases] == ["prompt", "2 tokens"]
    assert plan.fits


def searched(scratch: str, reserved: str) -> torch_offload.Search:
    config = Config(gpu="8MiB", gpu_reserved=reserved, ram="4MiB", ssd=scratch, min_paged_bytes=0, page_elements=PAGE)
    model, batch = tiny_model("llama", tied=False), batch_of(rows=2, tokens=16)
    options = {"probe": GPU_MACHINE, "timing_seconds": 0, "ssd_bytes": "1GiB"}
    return torch_offload.search(model, batch, config=config, **options)


def test_a_search_has_its_memory_and_its_kernels(scratch, fake_gpu):
    """What fits depends on what is reserved, and is said with it."""
    found = in_gpu_child(fake_gpu, searched, str(scratch), "4MiB")
    assert found.best is not None
    assert found.best.plan.fits
    assert {each.setup.activations for each in found.candidates} >= {"page", "keep", "ram"}
    nothing = in_gpu_child(fake_gpu, searched, str(scratch), "64KiB")
    assert nothing.best is None
    assert {tier for each in nothing.refused for tier in each.plan.missing_bytes} == {"reserved"}
    assert "gpu_reserved" in nothing.advice


def timed_there() -> tuple[float, int, float]:
    """Return the part of a plan that was timed, how many calls were, and the seconds of a step that computes."""
    filled = []
    original = call_timing.Caches.fill
    call_timing.Caches.fill = lambda self, gpu: filled.append(gpu) or original(self, gpu)
    call_timing.GPU_CACHE_BYTES = 1 << 10
    plan = layers_in(1 << 20, timing_seconds=60)
    assert set(filled) == {torch.device(GPU)}
    return plan.timed_share, len(filled), plan.resource_seconds["compute"]


def test_operators_are_timed_there(fake_gpu):
    """By events on its stream, each behind the filling of its caches."""
    share, count, seconds = in_gpu_child(fake_gpu, timed_there)
    assert share == pytest.approx(1.0)
    assert count > 10
    assert seconds > 0


class Grouped:
    """Says that it is torch's grouped product, and keeps where the groups end."""

    overloadpacket = call_timing.GROUPED_PRODUCT

    def __init__(self) -> None:
        self.ends: list[int] = []

    def __call__(self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> None:
        """Compute nothing."""
        self.ends = ends.tolist()


@pytest.mark.parametrize("right", [(5, 16, 4), (40, 4)], ids=["forward", "backward"])
def test_groups_of_a_product_end_where_its_rows_do(right):
    """Elsewhere a GPU would read beside them, or compute next to nothing."""
    left = (40, 16) if len(right) == 3 else (16, 40)
    operator = Grouped()
    given = [torch.empty(size, device="meta") for size in (left, right)]
    call = Call.of(operator, (*given, torch.empty(5, dtype=torch.int32)), {}, torch.empty(0))
    shapes = [shape._replace(device=torch.device("cpu")) for shape in call.arguments]
    on_host = Call(operator, tuple(shapes), (), output_bytes=0, flops=0)
    assert call_timing.timed_seconds(on_host, call_timing.Caches(), warm_up=False) is not None
    assert operator.ends == [8, 16, 24, 32, 40]


def measure_rates() -> Any:
    compute_rates.COPY_BYTES = compute_rates.LINK_BYTES = 1 << 20
    compute_rates.GEMM_SIZE_OF_GPU = 64
    compute_rates.UPDATED_PAGES_OF_GPU = 1
    take = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: take(*sizes, **options)  # the fake has no such memory
    return compute_rates.gpu_rates(GPU)


def test_its_rates_are_measured(fake_gpu):
    rates = in_gpu_child(fake_gpu, measure_rates)
    assert min(rates.to_device, rates.to_host, rates.copy_rate) > 0
    assert set(rates.gemm) == {"float32", "bfloat16"}
    assert min([*rates.gemm.values(), *rates.update.values()]) > 0


def plan_without_rates(probe: torch_offload.Probe, optimizer: str) -> str:
    config = Config(gpu="8MiB", gpu_reserved="1MiB", ram="16MiB", min_paged_bytes=0, page_elements=PAGE)
    config = config.replace(optimizer_device="gpu")
    with pytest.raises(ConfigError) as raised:
        plan_of(Layers(*[WIDTH] * 3), {"value": torch.randn(ROWS, WIDTH)}, config, probe=probe, optimizer=optimizer)
    return str(raised.value)


def test_a_probe_of_no_gpu_is_refused(fake_gpu):
    said = in_gpu_child(fake_gpu, plan_without_rates, MACHINE, "adamw_torch_fused")
    assert said.startswith("probe: it has no rates of a GPU")


def test_an_optimizer_without_kernels_is_refused(fake_gpu):
    """Of an extension that was built without CUDA; the run would end in its first step."""
    rates = GPU_MACHINE.gpu.model_copy(update={"update": {"adamw_torch_fused": 1e9}})
    probe = GPU_MACHINE.model_copy(update={"gpu": rates})
    said = in_gpu_child(fake_gpu, plan_without_rates, probe, "torch_offload.AdamW")
    assert said.startswith("optimizer: torch_offload.AdamW has no kernels for this GPU")
