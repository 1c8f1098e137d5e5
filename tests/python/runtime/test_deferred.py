"""Recorded optimizer work gives the bits of plain torch, for every optimizer and every way to mix operators."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from support.bare_training import (
    PAGE_ELEMENTS,
    STEPS,
    MakeOptimizer,
    Optimizer,
    Program,
    Run,
    adamw,
    assert_equal_bits,
    make_engine,
    sgd,
    training,
)
from support.bits import digest, same_bits
from support.small_module import step as train_one_step
from torch import Tensor, nn

import torch_offload
from torch_offload import _C, Config


def assert_deferred_and_equal(directory: Path, program: Program, dtype: torch.dtype = torch.float32) -> Run:
    """Runs the program plain and paged; work must have been put off, pages must have left."""
    plain, paged = Run(dtype=dtype), Run(make_engine(directory), dtype)
    program(plain)
    program(paged)
    assert paged.count("recorded_elements") > 0
    assert paged.count("applied_pages") > paged.count("applied_at_once")
    assert paged.count("evictions") > 0
    assert_equal_bits(paged.everything(), plain.everything())
    return paged


def two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    groups = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def with_frozen(parameters: list[nn.Parameter]) -> Optimizer:
    parameters[1].requires_grad_(False)
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "adamw-decay": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.95), fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "adamw-groups": two_groups,
    "adamw-frozen": with_frozen,
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adam-amsgrad-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, fused=True),
    "sgd": sgd,
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.2, fused=True),
    "sgd-nesterov-maximize": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, maximize=True, fused=True
    ),
    "sgd-tensor-lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(1e-2), momentum=0.9, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_fused_optimizers(scratch: Path, make: MakeOptimizer, set_to_none: bool) -> None:
    """Fused optimizers put off page by page end with the weights and states of plain torch."""
    assert_deferred_and_equal(scratch, training(make, set_to_none=set_to_none))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(scratch: Path, dtype: torch.dtype) -> None:
    """The same holds in every precision."""
    assert_deferred_and_equal(scratch, training(OPTIMIZERS["adamw-decay"]), dtype)


def test_learning_rate_that_changes_in_place(scratch: Path) -> None:
    """A recorded step keeps the learning rate and the step count of its own time."""

    def program(run: Run) -> None:
        rate = torch.tensor(1e-2)
        run.optimizer = torch.optim.AdamW(run.parameters, lr=rate, fused=True)
        for _ in range(STEPS):
            run.backward()
            run.evict()
            run.step()
            rate.mul_(0.5)
            for state in run.optimizer.state.values():
                state["step"].add_(0.0)
            run.optimizer.zero_grad()

    assert_deferred_and_equal(scratch, program)


def test_schedule(scratch: Path) -> None:
    """A learning-rate schedule reaches every recorded step."""

    def program(run: Run) -> None:
        run.optimizer = torch.optim.AdamW(run.parameters, lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.7)
        for _ in range(STEPS):
            run.backward()
            run.evict()
            run.step()
            schedule.step()
            run.optimizer.zero_grad()

    assert_deferred_and_equal(scratch, program)


def test_parameter_without_gradient(scratch: Path) -> None:
    """A parameter that a step leaves out is left out."""

    def program(run: Run) -> None:
        run.optimizer = torch.optim.AdamW(run.parameters, lr=1e-2, fused=True)
        for step in range(STEPS):
            run.backward(skip=step % 3)
            run.evict()
            run.step()
            run.optimizer.zero_grad()

    assert_deferred_and_equal(scratch, program)


def test_scaled_gradients_and_skipped_steps(scratch: Path) -> None:
    """Gradient scaling unscales in the recorded step, and a step with an overflow changes nothing."""

    def program(run: Run) -> None:
        run.optimizer = torch.optim.AdamW(run.parameters, lr=1e-2, fused=True)
        for step in range(STEPS):
            run.backward()
            run.evict()
            run.optimizer.grad_scale = torch.tensor(8.0)
            run.optimizer.found_inf = torch.tensor(float(step == 1))
            run.step()
            run.optimizer.found_inf.fill_(7.0)
            del run.optimizer.grad_scale, run.optimizer.found_inf
            if step % 2:
                run.optimizer.zero_grad()

    assert_deferred_and_equal(scratch, program)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_clipping_and_accumulation(scratch: Path, set_to_none: bool) -> None:
    """Clipping is put off with the step; a gradient that grows after clipping grows from its clipped value."""

    def program(run: Run) -> None:
        run.optimizer = torch.optim.AdamW(run.parameters, lr=1e-2, fused=True)
        for _ in range(STEPS):
            run.backward()
            run.evict()
            nn.utils.clip_grad_norm_(run.parameters, 0.5)
            run.backward()
            run.evict()
            nn.utils.clip_grad_norm_(run.parameters, 0.7)
            run.step()
            run.optimizer.zero_grad(set_to_none=set_to_none)

    assert_deferred_and_equal(scratch, program)


def mixed_operators(run: Run) -> None:
    run.optimizer = torch.optim.AdamW(run.parameters, lr=1e-2, fused=True)
    scalars = [0.9 + 0.01 * index for index in range(len(run.parameters))]
    for _ in range(STEPS):
        run.backward()
        run.evict()
        with torch.no_grad():
            gradients = run.gradients()
            torch._foreach_mul_(gradients, 0.77)
            torch._foreach_div_(gradients, torch.tensor(1.3))
            torch._foreach_add_(gradients, scalars)
            torch._foreach_add_(gradients, list(run.parameters), alpha=0.01)
            run.step()
            torch._foreach_mul_(run.parameters, scalars)
            torch._foreach_sub_(run.parameters, gradients)
            torch._foreach_div_(run.parameters, 1.01)
            torch._foreach_add_(run.parameters, torch.tensor(0.25))
            torch._foreach_zero_(gradients)


def test_operators_between_steps(scratch: Path) -> None:
    """List operators of every kind run in the order in which they were called."""
    assert_deferred_and_equal(scratch, mixed_operators)


def test_versions(scratch: Path) -> None:
    """Recorded operators raise version counters when and where plain torch does."""

    def versions(run: Run) -> list[int]:
        mixed_operators(run)
        return [tensor._version for tensor in (*run.parameters, *run.gradients(), *run.states())]

    plain, paged = Run(), Run(make_engine(scratch))
    assert versions(paged) == versions(plain)
    assert paged.count("recorded_elements") > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_versions_in_every_mode(scratch: Path, mode: Callable[[], AbstractContextManager[object]]) -> None:
    """The same holds whatever autograd is told."""
    plain, paged = (torch.ones(3 * PAGE_ELEMENTS) for _ in range(2))
    engine = make_engine(scratch)
    engine.manage(paged, kind="other", label="tensor")
    engine.evict(paged)
    with mode():
        for tensor in (plain, paged):
            torch._foreach_mul_([tensor], 2.0)
    assert engine.has_pending_work(paged)
    assert paged._version == plain._version
    assert same_bits(paged, plain)


def test_saved_tensor_check_sees_recorded_writes(scratch: Path) -> None:
    """Backward through a weight that a recorded operator changed raises, as in plain torch."""
    run = Run(make_engine(scratch))
    weight = run.parameters[0]
    factor = torch.ones_like(weight, requires_grad=True)
    product = (weight * factor).sum()
    run.engine.evict(weight)
    with torch.no_grad():
        torch._foreach_mul_([weight], 2.0)
    assert run.engine.has_pending_work(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda weights: torch._foreach_mul_(weights, 1j),
        lambda weights: torch._foreach_mul_(weights, torch.ones(2)),
        lambda weights: torch._foreach_add_(weights, [1.0]),
        lambda weights: torch._fused_sgd_(
            weights, weights[:1], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        ),
        lambda weights: torch._fused_adamw_(
            weights, weights, weights, weights, [], [torch.ones(()) for _ in weights], lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, amsgrad=True, maximize=False,
        ),
    ],
    ids=["complex", "vector", "short", "lengths", "amsgrad"],
)  # fmt: skip
def test_wrong_calls_raise_at_the_call(scratch: Path, call: Callable[[list[Tensor]], None]) -> None:
    """A call that plain torch refuses is refused at the call with the same words, and nothing is recorded."""
    messages = []
    for run in (Run(), Run(make_engine(scratch))):
        run.optimizer = sgd(run.parameters)
        run.evict()
        with torch.no_grad(), pytest.raises((RuntimeError, TypeError, ValueError)) as failure:
            call(list(run.parameters))
        messages.append(str(failure.value).splitlines()[0])
    assert messages[0] == messages[1]
    assert run.count("recorded_elements") == 0


def test_gradients_are_not_recorded_under_autograd(scratch: Path) -> None:
    """A leaf that requires a gradient cannot be written in grad mode, recorded or not."""
    run = Run(make_engine(scratch))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch._foreach_mul_(run.parameters, 2.0)
    assert run.count("recorded_elements") == 0


def test_elements_that_share_storage(scratch: Path) -> None:
    """A list that names a tensor twice, or parts of one, is worked off in its order."""
    results = []
    for run in (Run(), Run(make_engine(scratch))):
        run.optimizer = sgd(run.parameters)
        run.evict()
        weights = [parameter.detach() for parameter in run.parameters]
        half = weights[2][PAGE_ELEMENTS:]
        torch._foreach_mul_([weights[0], weights[1], weights[0], half], [1.5, 0.3, -0.7, 3.0])
        torch._foreach_add_([weights[0], weights[2]], [weights[0], weights[2]])
        torch._foreach_mul_(weights[:2], weights[2][5])
        results.append(run.everything())
    assert_equal_bits(results[1], results[0])
    assert run.count("recorded_elements") > 0


def test_layouts(scratch: Path) -> None:
    """Transposed and strided tensors give the same bits; a list is recorded where its tensors lie alike."""
    results = []
    for run in (Run(), Run(make_engine(scratch))):
        run.optimizer = sgd(run.parameters)
        run.evict()
        weights = [run.parameters[0].detach().t(), run.parameters[1].detach()]
        others = [run.random((161, 129)), run.random((256, 64)).t(), run.random((129, 161)).t()]
        for other in others:
            run.manage(other, "other", "other")
            run.evict()
        with torch.no_grad():
            torch._foreach_add_(weights, others[:2])
            assert run.engine is None or run.count("recorded_elements") == 0
            torch._foreach_mul_([weights[0]], others[2:])
        results.append(run.everything())
    assert run.count("recorded_elements") == 1
    assert_equal_bits(results[1], results[0])


def test_kernels_that_show_where_they_are_cut_are_not_recorded(scratch: Path) -> None:
    """Sums with a factor on half precision depend on where a run ends: they run whole."""
    results = []
    for run in (Run(dtype=torch.bfloat16), Run(make_engine(scratch), torch.bfloat16)):
        run.optimizer = sgd(run.parameters)
        run.backward()
        run.evict()
        with torch.no_grad():
            torch._foreach_add_(run.parameters, run.gradients(), alpha=0.3331)
            torch._foreach_add_(run.parameters, torch.tensor(0.3), alpha=0.77)
        results.append(run.everything())
    assert run.count("recorded_elements") == 0
    assert_equal_bits(results[1], results[0])


def test_orders_of_different_sets(scratch: Path) -> None:
    """Work recorded for separate sets of tensors keeps its order when an operator joins them."""
    results = []
    for run in (Run(), Run(make_engine(scratch))):
        run.optimizer = adamw(run.parameters)
        weights = [parameter.detach() for parameter in run.parameters]
        others = [run.random(tuple(weight.shape)) for weight in weights]
        for other in others:
            run.manage(other, "other", "other")
            if _C.is_managed(other):
                run.engine.evict(other)
        run.evict()
        torch._foreach_mul_(weights, 1.7)
        torch._foreach_add_(others, 0.3)
        torch._foreach_mul_(weights, others)
        torch._foreach_sub_(others, weights)
        results.append([*run.everything(), *(other.clone() for other in others)])
    assert run.count("forced_chains") > 0
    assert_equal_bits(results[1], results[0])


class Padded(nn.Module):
    """Weights that are the first rows of longer storages, as shards of the last rank are; pages have 8 rows."""

    rows, rows_of_storage, columns = 90, 100, 512

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(self.rows_of_storage, self.columns) for _ in range(2)]
        self.up, self.down = (nn.Parameter(each[: self.rows]) for each in whole)

    def forward(self, value: Tensor) -> Tensor:
        return (value @ self.up.T).relu() @ self.down

    def storages(self) -> list[str]:
        whole = (self.rows_of_storage, self.columns)
        with torch.no_grad():
            return [digest(weight.as_strided(whole, (self.columns, 1))) for weight in self.parameters()]


@pytest.mark.parametrize("make", [adamw, sgd, torch_offload.AdamW], ids=["adamw", "sgd", "own"])
def test_shards_with_padding(scratch: Path, make: MakeOptimizer) -> None:
    """What is put off has the pages of the shard, one less than its storage, and leaves the padding alone."""

    def train(module: Padded) -> list[object]:
        optimizer = make(list(module.parameters()))
        losses = [train_one_step(module, optimizer, clips=True, features=module.columns).item() for _ in range(3)]
        return [losses, module.storages()]

    expected = train(Padded())
    paged = Padded()
    torch_offload.wrap(paged, config=Config(ram="700KiB", ssd=scratch, min_paged_bytes=0, page_elements=4096))
    assert train(paged) == expected
    counters = torch_offload.report().counters
    shard_pages = 12
    assert counters["recorded_elements"] >= 3 * 2
    assert counters["applied_pages"] == shard_pages * counters["recorded_elements"]
    assert torch_offload.report().evictions > 0
