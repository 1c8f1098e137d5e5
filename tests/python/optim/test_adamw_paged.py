"""torch_offload.AdamW on paged parameters: recorded per page, with the bits of the same optimizer in memory."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.bare_training import STEPS, Program, Run, assert_equal_bits, make_engine, training
from support.bits import digest
from support.models import VOCABULARY, tiny_config
from support.training import digest_run
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import torch_offload
from torch_offload import _C

BUDGET_SHARE = 0.3


def assert_deferred_and_equal(directory: Path, program: Program, dtype: torch.dtype = torch.bfloat16) -> Run:
    """Runs the program plain and paged; the optimizer's work must have been put off, pages must have left."""
    plain = Run(dtype=dtype)
    program(plain)
    held = [*plain.parameters, *plain.parameters, *plain.states()]  # a gradient is as large as its weight
    paged = Run(make_engine(directory, int(BUDGET_SHARE * sum(tensor.nbytes for tensor in held))), dtype)
    program(paged)
    assert paged.count("recorded_elements") >= STEPS * (len(paged.parameters) - 1)
    assert paged.count("applied_pages") > paged.count("applied_at_once")
    assert paged.count("evictions") > 0
    assert_equal_bits(paged.everything(), plain.everything())
    return paged


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "split": lambda p: torch_offload.AdamW(p, lr=1e-2),
    "fp32-master": lambda p: torch_offload.AdamW(p, lr=1e-2, master="fp32"),
    "amsgrad": lambda p: torch_offload.AdamW(p, lr=1e-2, amsgrad=True),
    "clipping": lambda p: torch_offload.AdamW(p, lr=1e-2, max_grad_norm=0.5),
    "maximize-tensor-lr": lambda p: torch_offload.AdamW(p, lr=torch.tensor(1e-2), maximize=True),
    "8bit": lambda p: torch_offload.AdamW(p, lr=1e-2, moments="8bit"),
    "groups": lambda p: torch_offload.AdamW([{"params": p[:2]}, {"params": p[2:], "master": "fp32"}], lr=1e-2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_steps_put_off_page_by_page(scratch, make, set_to_none):
    """At a budget of 30 % of the state, weights, halves and moments are those of the run in memory."""
    assert_deferred_and_equal(scratch, training(make, set_to_none=set_to_none))


@pytest.mark.parametrize("name", ["split", "8bit", "clipping"])
def test_float32_parameters(scratch, name):
    """Those go through torch's kernel, or ours with 8-bit moments, and are put off as well."""
    assert_deferred_and_equal(scratch, training(OPTIMIZERS[name]), torch.float32)


def test_clipping_and_accumulation(scratch):
    """Clipping by clip_grad_norm_ is put off with the step; a gradient that grows after it grows from there."""

    def program(run: Run) -> None:
        run.optimizer = OPTIMIZERS["split"](run.parameters)
        for _ in range(STEPS):
            run.backward()
            run.evict()
            nn.utils.clip_grad_norm_(run.parameters, 0.5)
            run.backward()
            run.evict()
            nn.utils.clip_grad_norm_(run.parameters, 0.7)
            run.step()
            run.optimizer.zero_grad()

    paged = assert_deferred_and_equal(scratch, program)
    assert paged.count("recorded_elements") >= 3 * STEPS * (len(paged.parameters) - 1)


def test_scaled_gradients_and_skipped_steps(scratch):
    """A recorded step unscales with the scale of its own time, and one with an overflow changes nothing."""

    def program(run: Run) -> None:
        run.optimizer = OPTIMIZERS["split"](run.parameters)
        for step in range(STEPS):
            run.backward()
            run.evict()
            run.optimizer.grad_scale = torch.tensor(8.0)
            run.optimizer.found_inf = torch.tensor(float(step == 1))
            run.step()
            run.optimizer.found_inf.fill_(7.0)
            run.optimizer.grad_scale.fill_(0.0)
            del run.optimizer.grad_scale, run.optimizer.found_inf
            run.optimizer.zero_grad()

    assert_deferred_and_equal(scratch, program)


def test_all_states_of_a_page_are_updated_together(scratch):
    """Parameter, low half and moments of different widths wait for the same work and are done when one is read."""
    run = Run(make_engine(scratch), torch.bfloat16)
    run.optimizer = OPTIMIZERS["split"](run.parameters)
    run.backward()
    run.evict()
    run.unended_step()
    parameter = run.parameters[1]
    state = run.optimizer.state[parameter]
    members = [parameter, *(state[name] for name in ("exp_avg", "exp_avg_sq", "master_low"))]
    assert all(run.engine.has_pending_work(member) for member in members)
    assert [member.element_size() for member in members] == [2, 4, 4, 2]
    state["exp_avg_sq"].sum()
    assert not any(run.engine.has_pending_work(member) for member in members)


def state_with_a_misfit(run: Run, parameter: nn.Parameter, *, is_paged: bool) -> dict[str, Tensor]:
    """The first moment is not paged, or its pages are those of a tensor of another dtype; the rest is in order."""
    misfit = torch.zeros(2 * parameter.numel(), dtype=torch.int16)
    if is_paged:
        run.manage(misfit, "state", "halves")
    fitting = {"exp_avg_sq": torch.zeros(parameter.shape), "master_low": torch.zeros_like(parameter, dtype=torch.int16)}
    for name, value in fitting.items():
        run.manage(value, "state", name)
    return {"step": torch.zeros(()), "exp_avg": misfit.view(torch.float32).view(parameter.shape), **fitting}


def test_pages_that_do_not_match_are_updated_at_once(scratch):
    """A state that is not paged, or whose pages cover other elements, runs in the ordinary way with equal bits."""
    results = []
    for run in (Run(dtype=torch.bfloat16), Run(make_engine(scratch), torch.bfloat16)):
        run.optimizer = OPTIMIZERS["split"](run.parameters)
        for index, parameter in enumerate(run.parameters):
            run.optimizer.state[parameter] = state_with_a_misfit(run, parameter, is_paged=index % 2 == 0)
        for _ in range(STEPS):
            run.backward()
            run.evict()
            run.step()
        results.append(run.everything())
    assert run.count("recorded_elements") == 0
    assert_equal_bits(results[1], results[0])


@pytest.mark.parametrize("name", ["split", "8bit"])
def test_a_paged_run_resumes(scratch, name):
    """States loaded under paged parameters are paged at once, and the run goes on with the bits of a run in one go."""
    plain = Run(dtype=torch.bfloat16)
    plain.optimizer = OPTIMIZERS[name](plain.parameters)
    for _ in range(2 * STEPS):
        plain.backward()
        plain.step()

    run = Run(make_engine(scratch), torch.bfloat16)
    run.optimizer = OPTIMIZERS[name](run.parameters)
    for step in range(2 * STEPS):
        if step == STEPS:
            saved = copy.deepcopy(run.optimizer.state_dict())
            run.optimizer = OPTIMIZERS[name](run.parameters)
            run.optimizer.load_state_dict(saved)
            large = run.optimizer.state[run.parameters[0]]
            assert all(_C.is_managed(large[state]) for state in ("exp_avg", "exp_avg_sq", "master_low"))
        run.backward()
        run.evict()
        run.step()
    assert_equal_bits(run.everything(), plain.everything())


# --- Through the public surface -------------------------------------------------------------------------------------


def bf16_model() -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config("llama", tied=True, hidden=128, layers=4)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def plain_and_wrapped(config: torch_offload.Config) -> Iterator[nn.Module]:
    """One after the other. Budget: 30 % of weights, gradients, low halves and fp32 moments."""
    yield bf16_model()
    model = bf16_model()
    state_bytes = (2 + 2 + 2 + 4 + 4) * sum(parameter.numel() for parameter in model.parameters())
    yield torch_offload.wrap(model, config=config, ram=int(BUDGET_SHARE * state_bytes))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def assert_was_paged() -> None:
    report = torch_offload.report()
    assert report.host_peak_bytes <= report.budget_bytes
    assert report.ssd_read_bytes > 0
    assert report.ssd_written_bytes > 0
    assert report.counters["recorded_elements"] > 0


def trainer_for(model: nn.Module, directory: Path, **options: object) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        use_cpu=True,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"save_strategy": "no"} | options),
    )
    optimizer = torch_offload.AdamW(model.parameters(), lr=1e-2)
    return Trainer(model=model, args=arguments, train_dataset=rows(24), optimizers=(optimizer, None))


def test_the_stock_trainer_takes_it(config, tmp_path):
    """Given to Trainer as its optimizer, with clipping and accumulation: equal weights and states, paged or not."""
    results = []
    for model in plain_and_wrapped(config):
        trainer = trainer_for(model, tmp_path)
        trainer.train()
        results.append(digest_run(model, trainer.optimizer.optimizer))
    assert_was_paged()
    assert results[0] == results[1]


def test_a_trainer_checkpoint_resumes(config, tmp_path):
    """A plain run saves half way; resumed from its checkpoint, plain and paged runs end where it ended."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = bf16_model()
    trainer = trainer_for(first, tmp_path / "first", **saving)
    trainer.train()
    expected = digest_run(first, trainer.optimizer.optimizer)
    for model in plain_and_wrapped(config):
        resumed = trainer_for(model, tmp_path / "second")
        resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
        assert digest_run(model, resumed.optimizer.optimizer) == expected
    assert_was_paged()


def test_unwrap_gives_ordinary_states_back(config):
    """After unwrap every state is an ordinary tensor with the bits it would have had."""
    results = []
    for model in plain_and_wrapped(config):
        optimizer = torch_offload.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for row in rows(3):
            model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if results:
            assert_was_paged()
            torch_offload.unwrap(model)
        states = [value for p in model.parameters() for value in optimizer.state[p].values()]
        assert not any(_C.is_managed(value) for value in states)
        results.append([*digest_run(model, optimizer).values(), *map(digest, states)])
    assert results[0] == results[1]
