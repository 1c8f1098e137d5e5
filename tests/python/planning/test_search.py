"""A search finds what a plan of every setup would find, avoids what costs bytes, and names what lacks least.

Method: a small model on the meta device and a made-up machine, so that nothing depends on this one; every setup planned
by `plan`, with the pages of a run, beside what the search chose.
"""

import dataclasses
import functools
import itertools
import json

import pytest
import torch
from support.figures import MACHINE
from support.models import tiny_config
from transformers import AutoModelForCausalLM

import torch_offload
from torch_offload import Config, ConfigError
from torch_offload.integrations.hf_models import batch_of
from torch_offload.planning.search import EQUAL, Planner, Question, Recordings, answer, meta_copy
from torch_offload.planning.search_page import page_of
from torch_offload.planning.setups import Setup, divisors, first_rows, precisions_named, rows_of_step, setups_of
from torch_offload.planning.what_if import WhatIf, machines_of, rates_of, sizes_of

PAGE = 8192
ROWS = 4
SLOW = MACHINE.model_copy(update={"ssd_read": 1e8, "ssd_write": 2e8, "ssd_mixed": 1.5e8})
WEAK = MACHINE.model_copy(update={"gemm": {"float32": 1e9, "bfloat16": 2e9}})


def tiny() -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config("llama", tied=False, hidden=256, layers=2)).train()


def state_bytes() -> int:
    return 16 * sum(weight.numel() for weight in tiny().parameters())


def config_of(share: float) -> Config:
    return Config(ram=int(share * state_bytes()), min_paged_bytes=0, page_elements=PAGE)


@functools.cache
def recordings(tokens: int) -> Recordings:
    return Recordings(tiny(), batch_of(ROWS, tokens), probe=MACHINE, timing_seconds=0)


@functools.cache
def recordings_of_weak(tokens: int) -> Recordings:
    return Recordings(tiny(), batch_of(ROWS, tokens), probe=WEAK, timing_seconds=0)


def question_of(share: float, *, probe=MACHINE, **options) -> tuple[Question, Recordings]:
    tokens = options.pop("tokens", 8)
    known = recordings_of_weak(tokens) if probe is WEAK else recordings(tokens)
    return Question(config=config_of(share), probe=probe, ssd_bytes=1 << 30, **options), known


def search_of(share: float, **options):
    return answer(*question_of(share, **options))


def planned(setup: Setup, share: float, **options) -> torch_offload.Plan:
    """Plan one setup with the pages of a run."""
    return Planner(*question_of(share, **options)).plan(setup, PAGE)


def all_setups() -> list[Setup]:
    return list(setups_of(ROWS, config=Config(), has_layers=True, is_checkpointed=False))


CASES = [*itertools.product((0.2, 0.5), (8, 64), (MACHINE, SLOW)), (2.0, 8, SLOW), (0.2, 64, WEAK)]


@pytest.mark.parametrize(("share", "tokens", "probe"), CASES)
def test_the_chosen_one_is_the_best_of_all_plans(share, tokens, probe):
    """Within a hundredth, among which the fewest bytes decide; the figures are those of the plan."""
    plans = {setup: planned(setup, share, tokens=tokens, probe=probe) for setup in all_setups()}
    seconds = {setup: plan.predicted_seconds for setup, plan in plans.items() if plan.fits}
    found = search_of(share, tokens=tokens, probe=probe)
    assert found.best.seconds <= EQUAL * min(seconds.values())
    assert found.best.replay == "exact"
    assert found.best.seconds == pytest.approx(seconds[found.best.setup], rel=1e-9)
    assert found.best.plan.peak_bytes == plans[found.best.setup].peak_bytes
    assert {each.setup for each in [*found.candidates, *found.refused]} == set(plans)


def test_a_plan_of_the_search_is_that_of_plan():
    """The public function, with a model that checkpoints its layers itself."""
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    setup = Setup(rows=2, accumulation=2, activations="keep", checkpointing=True)
    options = {"probe": MACHINE, "timing_seconds": 0, "ssd_bytes": 1 << 30}
    config = config_of(0.5).replace(activations="keep")
    plan = torch_offload.plan(model, batch_of(2, 8), config=config, micro_batches=2, **options)
    assert planned(setup, 0.5).to_dict() == plan.to_dict()


@pytest.mark.parametrize(("share", "tokens"), [(0.2, 8), (0.5, 8), (0.2, 64), (0.5, 64), (2.0, 8)])
def test_no_plan_is_faster_than_its_lower_bound(share, tokens):
    found = search_of(share, tokens=tokens, probe=SLOW)
    bounds = {each.setup: each.lower_bound_seconds for each in [*found.candidates, *found.refused]}
    for setup, bound in bounds.items():
        plan = planned(setup, share, tokens=tokens, probe=SLOW)
        assert 0 < bound <= plan.predicted_seconds * 1.0001, setup


@pytest.mark.parametrize("probe", [MACHINE, SLOW])
def test_updates_of_the_backward_have_one_batch(probe):
    """Of all rows; nothing is faster than its lower bound there, and clipping excludes it."""
    question, known = question_of(0.2, probe=probe)
    question = dataclasses.replace(question, config=question.config.replace(update="backward"))
    found = answer(question, known)
    every = [*found.candidates, *found.refused]
    assert {each.setup.accumulation for each in every} == {1}
    planner = Planner(question, known)
    for each in every:
        assert each.lower_bound_seconds <= planner.plan(each.setup, PAGE).predicted_seconds * (1 + 1e-9)
    with pytest.raises(ConfigError, match="update: 'backward' applies gradients before their norm is known"):
        answer(dataclasses.replace(question, is_clipped=True), known)


def test_accumulation_is_avoided_where_it_costs_bytes():
    """A quarter of the state in memory, few tokens: each micro-batch would bring the weights again."""
    found = search_of(0.25, probe=SLOW)
    assert (found.best.setup.rows, found.best.setup.accumulation) == (ROWS, 1)
    page = [each for each in all_setups() if each.activations == "page" and not each.checkpointing]
    bytes_by_count = {
        setup.accumulation: sum(
            sum(way.values())
            for plan in [planned(setup, 0.25, tokens=8, probe=SLOW)]
            for way in (plan.ssd_read, plan.ssd_written)
        )
        for setup in page
    }
    assert bytes_by_count[1] < bytes_by_count[2] < bytes_by_count[4]
    lines = list(found.why())
    assert lines[0].startswith("4 x 1, ")
    assert any(line.startswith("1 x 4, ") and ("of parameters read" in line or "cannot be" in line) for line in lines)


def test_activations_that_do_not_fit_are_split_or_recomputed():
    """Kept ones are refused with what they lack; the best fits."""
    found = search_of(0.12, tokens=64)
    refused = {each.setup: each.missing_bytes for each in found.refused}
    kept = Setup(rows=ROWS, accumulation=1, activations="keep")
    assert refused[kept] > 0
    assert found.best.plan.fits
    assert found.best.setup != kept


def test_where_nothing_fits_the_one_that_lacks_least_is_named():
    share = 0.005
    found = search_of(share, tokens=64)
    assert found.best is None
    assert found.candidates == []
    lacks = {setup: max(planned(setup, share, tokens=64).missing_bytes.values()) for setup in all_setups()}
    least = found.refused[0]
    assert least.missing_bytes == lacks[least.setup] == min(lacks.values())
    assert found.advice.startswith(f"nothing fits; {least.setup} lacks least: ram lacks {least.missing_bytes} bytes (")
    assert "give a ram of at least" in found.advice
    assert str(found).startswith("nothing fits")


def test_the_same_question_has_the_same_answer():
    """Costs are estimates here; with timed ones it is the same while they are known."""
    one, other = (search_of(0.25, tokens=8).to_dict() for _ in range(2))
    for each in (one, other):
        each.pop("search_seconds")
    assert one == other


def test_precisions_are_chosen_where_they_are_allowed():
    """bf16 halves the weights, and its optimizer has a master: fewer bytes. Not asked for, it is not looked at."""
    usual = search_of(0.25, tokens=8, probe=SLOW)
    allowed = search_of(0.25, tokens=8, probe=SLOW, allow=("bf16",))
    assert all(each.setup.precisions == () for each in [*usual.candidates, *usual.refused])
    assert allowed.best.setup.precisions == ("bf16",)
    assert allowed.best.seconds < usual.best.seconds
    assert "torch_offload.AdamW" in allowed.advice
    with pytest.raises(ConfigError, match="allow: 'fp8' is not known; there are: bf16, 8bit-moments"):
        search_of(0.25, allow=("fp8",))


def test_a_setting_that_is_given_is_not_searched():
    question, known = question_of(0.5)
    found = answer(dataclasses.replace(question, config=question.config.replace(activations="keep")), known)
    assert {each.setup.activations for each in found.candidates} == {"keep"}
    assert {each.setup.accumulation for each in found.candidates} == {1, 2, 4}


def test_updates_are_placed_where_there_is_a_choice():
    """Over an emulated GPU both places are looked at."""
    question, known = question_of(0.6)
    config = question.config.replace(gpu=int(0.4 * state_bytes()), emulation={"gpu": True})
    found = answer(dataclasses.replace(question, config=config), known)
    every = [*found.candidates, *found.refused]
    assert {each.setup.optimizer_device for each in every} == {"gpu", "cpu"}
    assert found.best.plan.update_tier == ("host" if found.best.setup.optimizer_device == "cpu" else "device")


def test_a_model_that_checkpoints_itself_is_not_asked_to():
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = publicly(model)
    assert not any(each.setup.recomputes for each in [*found.candidates, *found.refused])
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_the_model_stays_as_it_is():
    model = tiny().eval()
    before = [id(weight) for weight in model.parameters()]
    publicly(model)
    assert [id(weight) for weight in model.parameters()] == before
    assert not model.training
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def publicly(model: torch.nn.Module) -> torch_offload.Search:
    options = {"probe": MACHINE, "timing_seconds": 0, "ssd_bytes": "1GiB"}
    return torch_offload.search(model, batch_of(1, 8), config=config_of(0.5), **options)


def test_a_copy_has_no_memory_and_the_same_structure():
    """Tied weights stay tied, frozen ones frozen; whole numbers keep their type."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    model.register_buffer("count", torch.ones(3, dtype=torch.long))
    copied = meta_copy(model, dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in [*copied.parameters(), *copied.buffers()])
    assert copied[1].weight is copied[0].weight
    assert (copied[0].weight.dtype, copied.count.dtype) == (torch.bfloat16, torch.long)
    assert [weight.requires_grad for weight in copied.parameters()] == [True, True, False]


# --- What is asked for -------------------------------------------------------------------------------------------


def test_tokens_of_a_step_are_whole_rows():
    assert rows_of_step(4096, 512) == 8
    with pytest.raises(ConfigError, match=r"4000 is no multiple of --sequence 512; the nearest are 3584 or 4096"):
        rows_of_step(4000, 512)
    with pytest.raises(ConfigError, match="the nearest are 512 or 1024"):
        rows_of_step(100, 512)
    with pytest.raises(ConfigError, match="must be at least 1"):
        rows_of_step(0, 512)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ConfigError, match="batch: expected tensors with as many rows"):
        torch_offload.search(tiny(), {"use_cache": False}, config=config_of(1), probe=MACHINE, ssd_bytes=1)
    with pytest.raises(ConfigError, match=r"got \[2, 4\]"):
        torch_offload.search(
            tiny(),
            {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(4, 8, dtype=torch.long)},
            config=config_of(1),
            probe=MACHINE,
            ssd_bytes=1,
        )


def test_divisors_and_rows():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    batch = {"input_ids": torch.ones(4, 8), "flag": True, "scale": torch.tensor(2.0)}
    assert first_rows(batch, 2)["input_ids"].shape == (2, 8)
    assert first_rows(batch, 2)["flag"] is True
    assert precisions_named(["8bit-moments", "bf16"]) == ("bf16", "8bit-moments")


# --- What if -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def what_if() -> WhatIf:
    """Three budgets, two disks: one recording of each micro-batch."""
    known = recordings(8)
    sizes = [int(share * state_bytes()) for share in (0.005, 0.25, 2.0)]
    searches = []
    for machine in machines_of(sizes, [1e8, 1e10]):
        config = config_of(1).replace(ram=machine.ram_bytes)
        question = Question(config=config, probe=machine.probe(MACHINE), ssd_bytes=1 << 30)
        searches.append((machine, answer(question, known)))
    return WhatIf(searches=searches)


def test_more_memory_or_a_faster_disk_is_never_slower(what_if):
    best = {(m.ram_bytes, m.ssd_rate): s.best.seconds for m, s in what_if.searches if s.best is not None}
    assert len(best) == 4
    sizes = sorted({ram for ram, _ in best})
    for ram in sizes:
        assert best[ram, 1e10] <= best[ram, 1e8]
    for rate in (1e8, 1e10):
        assert best[sizes[1], rate] <= best[sizes[0], rate]
    assert best[sizes[0], 1e8] > 2 * best[sizes[0], 1e10]
    assert best[sizes[1], 1e8] == best[sizes[1], 1e10]  # nothing moves


def test_machines_are_a_table_and_json(what_if, capsys):
    from torch_offload.system.terminal import show

    show(what_if)
    shown = capsys.readouterr().out
    assert "0.1 GB/s" in shown
    assert "nothing fits" in shown
    assert "ssd" in shown
    said = json.loads(what_if.to_json())
    assert len(said["machines"]) == 6
    assert said["machines"][0]["search"]["best"] is None
    assert said["machines"][2]["search"]["plan"]["fits"] is True
    assert any("lacks" in line for line in what_if.why())
    assert what_if.fits


def test_the_page_has_charts_of_every_candidate(what_if):
    page = page_of(what_if, probe=MACHINE)
    for words in ("Seconds per step against memory", "Roofline", "What every candidate waits for", "What to choose"):
        assert words in page
    assert "best by budget, 0.1 GB/s" in page
    assert "roof of 10 GB/s" in page
    assert page.count("Plotly.newPlot(") == 3
    assert "1 x 4" in page
    assert 'http-equiv="Content-Security-Policy"' in page


def test_a_page_without_anything_that_fits_has_no_charts(what_if):
    page = page_of(WhatIf(searches=what_if.searches[:1]), probe=MACHINE)
    assert "nothing fits" in page
    assert "Plotly.newPlot(" not in page


@pytest.mark.parametrize(
    ("text", "message"),
    [("3GB/s,x", "ssd-rate: cannot read 'x' as a rate"), ("0GB/s", "ssd-rate: expected more than 0")],
)
def test_rates_that_are_none_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        rates_of(text)


def test_lists_are_read():
    assert rates_of("3GB/s, 500MB/s,1GB") == [3e9, 5e8, 1e9]
    assert sizes_of("8GiB,16GiB") == [8 << 30, 16 << 30]
    with pytest.raises(ConfigError, match="ram: expected more than 0"):
        sizes_of("8GiB,0")
