"""The operators of this package have the bits on a GPU that they have on the CPU, each time."""

from dataclasses import dataclass, field

import pytest
import torch
from support.bits import digest
from torch import Tensor

COUNTS = (1, 7, 2048, 5003, 1 << 20)
RUNS = 10
OPTIONS = {
    "default": {"lr": 1e-3, "weight_decay": 0.01},
    "maximize": {"lr": 1e-2, "weight_decay": 0.3, "maximize": True},
    "far betas": {"lr": 1e-1, "beta1": 0.3, "beta2": 0.5, "eps": 0.0},
}


@dataclass
class State:
    """One parameter with all that a step takes and changes."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    masters: list[Tensor] = field(default_factory=list)

    def to(self, device: torch.device) -> "State":
        tensors = (self.weight, self.gradient, self.exp_avg, self.exp_avg_sq)
        return State(*(t.to(device, copy=True) for t in tensors), [m.to(device, copy=True) for m in self.masters])

    def digests(self) -> list[str]:
        return [digest(t.cpu()) for t in (self.weight, self.exp_avg, self.exp_avg_sq, *self.masters)]

    def step(self, number: int, *, clip: Tensor | None = None, found_inf: Tensor | None = None, **options) -> None:
        chosen = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": False} | options
        torch.ops.torch_offload.fused_adamw_(
            [self.weight],
            [self.gradient],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            self.masters,
            [torch.tensor(float(number))],
            amsgrad=False,
            found_inf=found_inf,
            clip_coefficient=clip,
            **chosen,
        )


def make_state(count: int, form: str, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(4, count, generator=generator)
    numbers[1, :: max(1, count // 5)] = torch.tensor(1e-39)  # below the normal range
    master, gradient, average, square = numbers[0], numbers[1], 0.01 * numbers[2], 0.001 * numbers[3].square()
    if form == "float32, 8-bit":
        return State(master.clone(), gradient, packed(average, is_second=False), packed(square, is_second=True))
    state = State(master.bfloat16(), gradient.bfloat16(), average, square)
    low = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, generator=generator)
    state.masters = [master.clone() if form == "fp32 master" else low]
    if form == "split, 8-bit":
        state.exp_avg, state.exp_avg_sq = packed(average, is_second=False), packed(square, is_second=True)
    return state


def packed(values: Tensor, *, is_second: bool) -> Tensor:
    return torch.ops.torch_offload.pack_moment(values.contiguous(), is_second)


FORMS = ("split", "fp32 master", "split, 8-bit", "float32, 8-bit")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_adamw_has_the_bits_of_the_cpu(device, count, form, options):
    """Method: the same three steps on both, every tensor compared after each."""
    here = make_state(count, form)
    there = here.to(device)
    for number in range(1, 4):
        clip = torch.tensor(0.37) if number == 2 else None
        here.step(number, clip=clip, **options)
        there.step(number, clip=None if clip is None else clip.to(device), **options)
        assert there.digests() == here.digests(), number


@pytest.mark.parametrize("form", FORMS)
def test_adamw_is_the_same_each_time(device, form):
    start = make_state(300_007, form).to(device)
    results = []
    for _ in range(RUNS):
        state = start.to(device)
        state.step(1, lr=1e-2)
        results.append(state.digests())
    assert results == [results[0]] * RUNS
    assert results[0] != start.digests()


def test_a_step_with_an_overflow_changes_nothing(device):
    """Method: found_inf on the GPU, which the host does not read."""
    state = make_state(5003, "split").to(device)
    before = state.digests()
    state.step(1, lr=1e-2, found_inf=torch.ones((), device=device))
    assert state.digests() == before
    state.step(1, lr=1e-2, found_inf=torch.zeros((), device=device))
    assert state.digests() != before


@pytest.mark.parametrize("count", [0, *COUNTS, 3 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("to_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("special", [0.0, float("inf"), float("nan")])
def test_a_writeback_has_the_bits_of_the_cpu_each_time(device, count, dtype, to_dtype, special):
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient[count // 2 : count // 2 + 1] = special
    results = []
    for target in (torch.device("cpu"), *[device] * RUNS):
        there = gradient.to(target)
        to = torch.empty_like(there, dtype=to_dtype)
        square_sum, nonfinite_count = torch.ops.torch_offload.write_back_gradient(there, to)
        results.append([digest(t.cpu()) for t in (to, square_sum, nonfinite_count)])
    assert results == [results[0]] * (RUNS + 1)


def test_a_writeback_is_the_norm(device):
    """Method: torch's own sum in double, to rounding."""
    gradient = torch.randn(1 << 20, device=device)
    square_sum, nonfinite_count = torch.ops.torch_offload.write_back_gradient(gradient, None)
    torch.testing.assert_close(square_sum, gradient.double().square().sum(), rtol=1e-13, atol=0)
    assert nonfinite_count.item() == 0
