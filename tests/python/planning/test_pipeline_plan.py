"""A plan of a pipeline replays what torch's schedules do, and foretells what a rank's engine moves.

Method: the calls of each schedule beside torch's own list of actions; a recording cut into stages whose parts can be
counted; a rank's calls made in earnest, on stages of small layers without other ranks, with the engine's counters
beside the plan.
"""

import itertools
import json
from typing import Any

import pytest
import torch
from support.isolation import in_child
from support.models import tiny_config
from support.planned_steps import counted_per_step, least_per_step
from torch import nn
from torch.distributed import pipelining
from transformers import AutoModelForCausalLM

import torch_offload
from torch_offload import Config, ConfigError, UnsupportedModelError
from torch_offload._compat import NotedStage
from torch_offload.planning.belady import Use
from torch_offload.planning.fake_trace import What, record
from torch_offload.planning.page_uses import StepShape
from torch_offload.planning.rank_uses import RankUses
from torch_offload.planning.schedules import SCHEDULES, StageCall, StageWork, calls_of, has_one_stage
from torch_offload.planning.stages import divided, layers_to_divide

WIDTH = 128
LAYERS = 8
ROWS = 4
MICRO_BATCHES = 8
PAGE = 16384
LAYER_BYTES = 8 * WIDTH * WIDTH * 4
SHARE = 0.36  # of a rank's state that its pages get
STAGES = {"1F1B": 2, "LoopedBFS": LAYERS}


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(torch.relu(self.up(value)))


class Stack(nn.Module):
    """Layers and a loss."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value).square().mean()


def batch() -> dict[str, torch.Tensor]:
    return {"value": torch.empty(ROWS, WIDTH, device="meta")}


def budget_of(ranks: int = 2, share: float = SHARE) -> int:
    return int(share * 4 * LAYERS // ranks * LAYER_BYTES)


def settings(ram: int | str, **more: Any) -> Config:
    return Config(ram=ram, min_paged_bytes=0, page_elements=PAGE, **more)


def planned(schedule: str, config: Config, **options: Any) -> torch_offload.PipelinePlan:
    with torch.device("meta"):
        model = Stack(options.pop("layers", LAYERS))
    defaults = {"ranks": 2, "micro_batches": MICRO_BATCHES, "ssd_bytes": "1GiB"}
    return torch_offload.plan(model, batch(), config=config, schedule=schedule, **{**defaults, **options})


# --- What is replayed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_micro_batch_once_each_way(name, ranks):
    """A backward comes after its forward, and the division of gradients after both."""
    stages = ranks if has_one_stage(name) else 2 * ranks
    for rank, calls in enumerate(calls_of(name, ranks=ranks, stages=stages, micro_batches=MICRO_BATCHES)):
        for stage in range(rank, stages, ranks):
            own = [call for call in calls if call.stage == stage]
            every = set(range(MICRO_BATCHES))
            assert {call.micro_batch for call in own if call.work is StageWork.forward} == every
            assert {call.micro_batch for call in own if call.work is StageWork.backward} == every
            assert len(own) == 2 * MICRO_BATCHES + 1
            assert own[-1].work is StageWork.scale
            for number in every:
                works = [call.work for call in own if call.micro_batch == number]
                assert works == [StageWork.forward, StageWork.backward]
        assert {call.stage for call in calls} == set(range(rank, stages, ranks))


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_calls_are_those_of_torchs_own_list(name):
    """As far as it is of computing, in its order."""
    stages = [NotedStage(index, stages=4, rank=1, ranks=2, calls=[]) for index in (1, 3)]
    listed = getattr(pipelining, f"Schedule{name}")(stages, MICRO_BATCHES).pipeline_order[1]
    letters = {StageWork.forward: "F", StageWork.backward: "B"}
    calls = calls_of(name, ranks=2, stages=4, micro_batches=MICRO_BATCHES)[1]
    made = [f"{call.stage}{letters[call.work]}{call.micro_batch}" for call in calls if call.work in letters]
    assert made == [str(action) for action in listed if action is not None]


def test_stages_are_parts_of_one_pass():
    """Each has its layers; nothing is lost. What a stage allocates for one micro-batch it frees, gradients aside."""
    model = Stack()
    recording = record(model, batch(), cut_at=layers_to_divide(model))
    stages = divided(recording, LAYERS, 4)
    assert [sorted(stage.parameters) for stage in stages] == [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    moments = [moment for stage in stages for moment in [*stage.forward, *stage.backward]]
    left_out = (What.layer, What.backward)
    assert len(moments) == sum(moment.what not in left_out for moment in recording.moments)
    for stage in stages:
        lives: dict[int, int] = {}
        for moment in [*stage.forward, *stage.backward]:
            if moment.what is What.allocate:
                lives[moment.subject] = moment.size_bytes
            elif moment.what is What.free:
                del lives[moment.subject]
        assert list(lives.values()) == [4 * WIDTH * WIDTH * 4] * 4  # the gradients
    hidden_bytes = ROWS * WIDTH * 4
    inner = [sorted(stage.received.values()) for stage in stages]
    assert inner[0] == [hidden_bytes]  # the gradient of its output
    assert inner[1] == inner[2] == [hidden_bytes, hidden_bytes]
    assert inner[3] == [hidden_bytes]  # its input


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_made_once_and_added_to(name):
    """By every micro-batch but the first; then they are divided, and used up by their update."""
    model = Stack()
    recording = record(model, batch(), cut_at=layers_to_divide(model))
    count = 2 if has_one_stage(name) else LAYERS
    cut = divided(recording, LAYERS, count)
    shape = StepShape(page_elements=PAGE, min_paged_bytes=0, optimizer="adamw_torch_fused", micro_batches=MICRO_BATCHES)
    calls = calls_of(name, ranks=2, stages=count, micro_batches=MICRO_BATCHES)[1]
    uses = RankUses(recording, shape, {number: cut[number] for number in range(1, count, 2)}, calls)
    events = list(uses.events(steps=2))
    first_end = next(index for index, event in enumerate(events) if event.use is Use.mark)
    pages = [page for page, kind in enumerate(uses.pages.kinds) if kind == "gradient"]
    assert len(pages) == LAYERS // 2 * 2 * 4 * WIDTH * WIDTH // PAGE
    for page in pages:
        order = [event.use for event in events[first_end:] if event.page == page]
        more = [Use.update] * (MICRO_BATCHES - 1 + 1)  # added to, and divided
        assert order == [Use.update, Use.drop, Use.create, *more]


def test_what_stands_around_the_layers_belongs_to_the_first_and_the_last():
    """Embeddings, and the head. Positions are made once, and each stage has its own copy of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", tied=False, hidden=64, layers=4)).train()
    tokens = {name: torch.ones(1, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    recording = record(model, tokens, cut_at=layers_to_divide(model))
    stages = divided(recording, 4, 2)
    names = [{recording.parameters[index].name for index in stage.parameters} for stage in stages]
    assert "model.embed_tokens.weight" in names[0] - names[1]
    assert {"model.norm.weight", "lm_head.weight"} <= names[1] - names[0]
    trained = {parameter.name for parameter in recording.parameters if parameter.is_trained}
    assert trained <= names[0] | names[1]
    assert len(stages[1].received) >= 3  # hidden states, sines and cosines


# --- Beside the engine -------------------------------------------------------------------------------------------


class Rank:
    """What a rank of a pipeline does, without the others: their tensors are ones."""

    def __init__(self, stages: dict[int, nn.Module], last: int, calls: list[StageCall]) -> None:
        self.stages, self.last, self.calls = stages, last, calls
        weights = [weight for module in stages.values() for weight in module.parameters()]
        self.optimizer = torch.optim.AdamW(weights, fused=True)

    def step(self) -> None:
        passes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for call in self.calls:
            key = (call.stage, call.micro_batch)
            if call.work is StageWork.forward:
                given = torch.ones(ROWS, WIDTH, requires_grad=call.stage > 0)
                passes[key] = (given, self.stages[call.stage](given))
            elif call.work is StageWork.backward:
                _, output = passes.pop(key)
                output = output.square().mean() if call.stage == self.last else output
                torch.autograd.backward(output, torch.ones_like(output))
            else:
                for weight in self.stages[call.stage].parameters():
                    weight.grad.div_(MICRO_BATCHES)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured(schedule: str, stages: int, scratch: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return what the first rank moves in a step, and the least for the engine's own list of uses."""
    layers = LAYERS // stages
    held = {number: nn.Sequential(*(Block() for _ in range(layers))) for number in range(0, stages, 2)}
    module = nn.ModuleList(held.values())
    torch_offload.wrap(module, config=settings(budget_of(), ssd=scratch))
    rank = Rank(held, stages - 1, calls_of(schedule, ranks=2, stages=stages, micro_batches=MICRO_BATCHES)[0])
    found = counted_per_step(rank.step), least_per_step(rank.step, budget_of())
    torch_offload.unwrap(module)
    return found


def all_measured(scratch: str) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    torch.set_num_threads(1)
    return {name: measured(name, stages, scratch) for name, stages in STAGES.items()}


def test_a_rank_moves_what_was_planned(scratch):
    """A plan lies between what the best eviction moves for the engine's own uses and what the engine moves."""
    for name, (counted, least) in in_child(all_measured, str(scratch)).items():
        rank = planned(name, settings(budget_of()), stages=STAGES[name]).best.ranks[0]
        plan = {"ssd_read": sum(rank.ssd_read.values()), "ssd_written": sum(rank.ssd_written.values())}
        for way in plan:
            assert 0 < least[way] <= plan[way] < 1.1 * counted[way], (name, way, plan, counted, least)
        assert sum(plan.values()) < 1.25 * sum(least.values()), (name, plan, least)


# --- What follows from it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_traffic_stays_within_its_closed_forms(share):
    """LoopedBFS with room for a stage reads each twice and writes it once, 1F1B reads it twice for each micro-batch."""
    bounds = {"LoopedBFS": (2, 1, LAYERS), "1F1B": (2 * MICRO_BATCHES, 1, 2)}
    for name, (most_read, most_written, stages) in bounds.items():
        best = planned(name, settings(budget_of(share=share)), stages=stages).best
        for rank in best.ranks:
            assert 0 < rank.ssd_read["parameter"] <= most_read * rank.weights_bytes
            assert 0 < rank.ssd_written["parameter"] <= most_written * rank.weights_bytes
            assert rank.ssd_read["state"] <= 2 * rank.weights_bytes


def test_auto_takes_what_moves_least():
    """One micro-batch after the other brings all gradients of a rank back each time, one stage after the other none."""
    plan = planned("auto", settings(budget_of()))
    moved = [candidate.moved_bytes for candidate in plan.candidates]
    assert moved == sorted(moved)
    assert (plan.best.name, plan.best.stages, plan.best.layers) == ("LoopedBFS", LAYERS, 1)
    assert {(each.name, each.stages) for each in plan.candidates} == {
        *itertools.product(("Interleaved1F1B", "LoopedBFS"), (2, 4, 8)),
        *itertools.product(("1F1B", "GPipe"), (2,)),
    }
    by_name = {(each.name, each.stages): each for each in plan.candidates}
    assert by_name["LoopedBFS", 8].moved_bytes < 0.5 * by_name["1F1B", 2].moved_bytes
    one_stage = [by_name[name, 2].moved_bytes for name in ("LoopedBFS", "GPipe")]  # the same, backwards from the last
    assert one_stage[0] == pytest.approx(one_stage[1], rel=0.05)
    assert by_name["1F1B", 2].moved_by_kind["gradient"] > 4 * by_name["LoopedBFS", 8].moved_by_kind["gradient"]
    said = str(plan)
    assert said.startswith("LoopedBFS, 8 stages of 1 layer: ")
    assert "1F1B, 2 stages of 4 layers: " in said
    assert "gradients alone" in said
    assert json.loads(plan.to_json())["candidates"][0]["moved_bytes"] == moved[0]


def test_more_layers_on_a_rank_move_in_proportion():
    small, large = (planned("LoopedBFS", settings(budget_of() * n), layers=8 * n, stages=8 * n).best for n in (1, 2))
    assert large.moved_over_weights == pytest.approx(small.moved_over_weights, rel=0.1)


def test_what_fits_in_memory_moves_nothing():
    plan = planned("LoopedBFS", settings("1GiB"), stages=2)
    assert plan.best.moved_bytes == 0
    assert "nothing moves" in str(plan)


def test_a_rank_without_memory_says_what_it_lacks():
    """As much as an operator on a weight, and what micro-batches keep with activations that stay."""
    plan = planned("LoopedBFS", settings("64KiB"), stages=8)
    assert not plan.fits
    assert "ram of rank 0 lacks" in str(plan)
    assert set(plan.best.ranks[1].missing_bytes) == {"ram"}
    kept = settings("1GiB", activations="keep")
    needed = [planned("LoopedBFS", kept, stages=8, micro_batches=n).best.ranks[0] for n in (16, 32)]
    more_bytes = needed[1].needed_bytes["ram"] - needed[0].needed_bytes["ram"]
    of_stages = 4 * (4 + 1 + 2) - 1  # a wide and an output, buffers of input and of gradient; the first has no input
    assert more_bytes == 16 * of_stages * ROWS * WIDTH * 4


def test_recomputing_is_planned_within_stages():
    """Layers run again in the backward of their stage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", tied=False, hidden=64, layers=4)).train()
    tokens = {name: torch.ones(2, 32, dtype=torch.long) for name in ("input_ids", "labels")}
    peaks = {
        mode: torch_offload.plan(
            model,
            tokens,
            config=settings("1GiB", activations=mode),
            schedule="LoopedBFS",
            ranks=2,
            micro_batches=8,
            stages=4,
            ssd_bytes="1GiB",
        )
        .best.ranks[0]
        .peak_bytes["ram"]
        for mode in ("page", "recompute")
    }
    assert peaks["recompute"] < peaks["page"]


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "2F2B"}, "schedule: '2F2B' is not known; there are: auto, 1F1B, GPipe, Interleaved1F1B, Loo"),
        ({"ranks": 1}, "ranks: a pipeline has at least 2, got 1"),
        ({"ranks": None}, "ranks: a pipeline has at least 2, got None"),
        ({"stages": 3}, "stages: 8 layers cannot be divided into 3 stages of equally many, .*; possible: 2, 4, 8"),
        ({"ranks": 3}, "8 layers cannot be divided into 3 stages .*; possible: none"),
        ({"schedule": "1F1B", "stages": 4}, "1F1B has one stage on each rank, so 2 ranks have 2, got 4"),
        ({"schedule": "1F1B", "micro_batches": 1}, r"schedule: 1F1B: Number of microbatches \(1\) must be greater"),
        ({"work": "evaluate"}, "work: pipelines are planned for training on the CPU"),
        ({"steps_per_day": 100}, "steps_per_day: pipelines are planned for training"),
        ({"gpu": "1GiB"}, "gpu: pipelines are planned for training on the CPU"),
        ({"activations": "auto"}, "activations: 'auto' chooses by seconds"),
        ({"update": "backward"}, "update: 'backward' works in a single process only"),
        ({"emulation": True}, "gpu: pipelines are planned in memory over the SSD only"),
        ({"rank": 2}, r"plan\(\): unknown setting 'rank'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message):
    config = settings("1MiB")
    if options.pop("emulation", False):
        config = config.replace(gpu="1MiB", emulation={"gpu": True})
    for name in ("activations", "update"):
        if name in options:
            config = config.replace(**{name: options.pop(name)})
    with pytest.raises(ConfigError, match=message):
        planned(options.pop("schedule", "LoopedBFS"), config, **options)


@pytest.mark.parametrize("name", ["ranks", "stages"])
def test_numbers_of_a_pipeline_without_its_schedule_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: 2 are of a pipeline; give its schedule as well"):
        torch_offload.plan(Stack(), batch(), **{name: 2})


def test_what_torch_refuses_is_left_out_of_a_comparison():
    """1F1B needs a micro-batch for each stage."""
    plan = planned("auto", settings(budget_of()), micro_batches=1)
    assert "1F1B" not in {candidate.name for candidate in plan.candidates}
    assert "Number of microbatches (1)" in plan.refused["1F1B"]
    assert "Number of microbatches (1)" in str(plan)


def test_models_that_are_no_pipeline_are_refused():
    """None of layers, none with weights that stages would share, none whose layers are called in another order."""

    class Backwards(Stack):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for layer in reversed(list(self.layers)):
                value = layer(value)
            return value.mean()

    config = settings("1MiB")
    more = {"schedule": "LoopedBFS", "ranks": 2, "micro_batches": 2, "ssd_bytes": "1GiB", "config": config}
    with pytest.raises(UnsupportedModelError, match="Linear has no layers"):
        torch_offload.plan(nn.Linear(8, 8), {"input": torch.randn(2, 8)}, **more)
    with pytest.raises(UnsupportedModelError, match="do not run once each in their order"):
        torch_offload.plan(Backwards(), batch(), **more)
    tied = Stack(4)
    tied.layers[3].up.weight = tied.layers[0].up.weight
    with pytest.raises(UnsupportedModelError, match=r"layers.0.up.weight is used by stages 0 and 3"):
        torch_offload.plan(tied, batch(), **more, stages=4)
