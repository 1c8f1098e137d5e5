"""Kernels that torch runs on paged tensors are those that it runs in memory, given the same, with all they touch.

Method: one operator on tensors in memory and paged out, results and errors side by side; the engine's counters.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from support.bare_training import PAGE_ELEMENTS, make_engine
from support.bits import digest

from torch_offload import _C, OutOfTierMemory

Thing = TypeVar("Thing")

BUDGET_BYTES = 4 << 20
SMALL_BUDGET_BYTES = 512 << 10


@pytest.fixture
def engine(scratch: Path) -> _C.Engine:
    """Nothing is too small to be paged."""
    return make_engine(scratch, BUDGET_BYTES, min_paged_bytes=0)


def paged(engine: _C.Engine, tensor: torch.Tensor, kind: str = "other") -> torch.Tensor:
    assert engine.manage(tensor, kind=kind, label="tensor")
    assert engine.evict(tensor) == 0
    return tensor


IN_PLACE = {
    "addr_": lambda t: t.addr_(torch.ones(8), torch.ones(4)),
    "addmm_": lambda t: t.addmm_(torch.ones(8, 2), torch.ones(2, 4)),
    "addmv_": lambda t: t.addmv_(torch.ones(8, 2), torch.ones(2)),
    "baddbmm_": lambda t: t.baddbmm_(torch.ones(3, 8, 2), torch.ones(3, 2, 4)),
    "add_": lambda t: t.add_(torch.ones(8, 4)),
    "mul_": lambda t: t.mul_(torch.ones(8, 4)),
    "lerp_": lambda t: t.lerp_(torch.ones(8, 4), 0.5),
    "addcmul_": lambda t: t.addcmul_(torch.ones(8, 4), torch.ones(8, 4)),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(8, 4, dtype=torch.bool), 1.0),
    "clamp_": lambda t: t.clamp_(min=torch.ones(8, 4)),
    "copy_": lambda t: t.copy_(torch.ones(8, 4)),
    "bitwise_and_": lambda t: t.bitwise_and_(1),
    "sub_": lambda t: t.sub_(torch.ones(4, dtype=torch.complex64)),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 9]), torch.ones(2)),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([9]), 1.0),
}


def error_of(call, tensor: torch.Tensor) -> tuple[str, str]:
    with pytest.raises((RuntimeError, IndexError)) as raised:
        call(tensor)
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_calls_are_refused_as_by_torch(engine, name):
    """In the same words; the tensor keeps its shape and its bits, and stays paged."""
    plain, managed = torch.arange(4.0), paged(engine, torch.arange(4.0))
    assert error_of(IN_PLACE[name], managed) == error_of(IN_PLACE[name], plain)
    assert managed.shape == plain.shape
    assert _C.is_managed(managed)
    assert digest(managed) == digest(plain)
    assert engine.statistics()["faults"] == 0


def test_a_view_that_grows_copies_its_storage(engine):
    """`resize_` of a few elements moves all bytes of the storage to new memory: none of them is absent then."""
    base = torch.arange(16.0 * PAGE_ELEMENTS)
    for size in (10, 0):
        plain, managed = base.clone(), paged(engine, base.clone())
        for whole in (plain, managed):
            view = whole[:size]
            view.resize_(20 * PAGE_ELEMENTS)
            assert digest(view[: base.numel()]) == digest(base)
    assert engine.statistics()["faults"] == 0


def test_a_gradient_seen_as_another_dtype_has_a_norm_of_its_own(engine):
    """What was kept for the gradient is no answer for its bytes as bfloat16, nor for another shape of them."""
    parameter = paged(engine, torch.randn(64, 64).requires_grad_(), kind="parameter")
    parameter.grad = torch.randn(64, 64)
    plain = parameter.grad.clone()
    engine.gradient_complete(parameter)
    assert _C.is_managed(parameter.grad)
    before = engine.statistics()["norms_from_cache"]
    seen = {
        "bfloat16": lambda gradient: gradient.view(torch.bfloat16),
        "complex": lambda gradient: torch.view_as_complex(gradient.view(64, 32, 2)),
        "transposed": lambda gradient: gradient.t(),
    }
    for name, see in seen.items():
        (found,), (expected,) = (torch._foreach_norm([see(gradient)]) for gradient in (parameter.grad, plain))
        assert digest(found) == digest(expected), name
    assert engine.statistics()["norms_from_cache"] == before
    (found,), (expected,) = torch._foreach_norm([parameter.grad]), torch._foreach_norm([plain])
    assert digest(found) == digest(expected)
    assert engine.statistics()["norms_from_cache"] == before + 1


def as_many_as_fit(make: Callable[[], Thing]) -> list[Thing]:
    """Call `make` until it is refused."""
    made: list[Thing] = []
    with contextlib.suppress(OutOfTierMemory):
        while True:
            made.append(make())
    return made


def fill(engine: _C.Engine) -> tuple[list[_C.Pin], list[torch.Tensor]]:
    """Pin one page after the other until no more fits, then allocate little things until none is granted."""
    pins = as_many_as_fit(lambda: engine.pin(paged(engine, torch.zeros(PAGE_ELEMENTS))))
    return pins, [*as_many_as_fit(lambda: torch.empty(256)), *as_many_as_fit(lambda: torch.empty(1))]


def test_what_overwrites_a_page_is_not_refused_its_memory(scratch):
    """A transposed copy takes a buffer after the old bytes are given up: with a full budget they would be lost."""
    engine = make_engine(scratch, SMALL_BUDGET_BYTES, min_paged_bytes=0)
    weight, source = paged(engine, torch.zeros(64, 64)), torch.randn(64, 64)
    engine.install_allocator()
    pins, small = fill(engine)
    pins.pop().release()
    weight.copy_(source.t())
    engine.remove_allocator()
    assert digest(weight) == digest(source.t())
    del pins, small


def test_what_is_not_overwritten_after_all_stays(scratch):
    """A copy from a part of another tensor, for which there is no room beside the target."""
    engine = make_engine(scratch, SMALL_BUDGET_BYTES, min_paged_bytes=0)
    plain = torch.randn(SMALL_BUDGET_BYTES // 4 * 5 // 8)
    target, source = paged(engine, plain.clone()), paged(engine, torch.randn(2 * plain.numel()))
    with pytest.raises(OutOfTierMemory, match="host memory tier"):
        target.copy_(source[PAGE_ELEMENTS : PAGE_ELEMENTS + plain.numel()])
    assert digest(target) == digest(plain)


def test_recorded_kernels_are_not_refused_their_memory(scratch):
    """With a full budget: what they allocate, a number for the factor, would have to wait for their end."""
    engine = make_engine(scratch, SMALL_BUDGET_BYTES, min_paged_bytes=0)
    plain = torch.randn(PAGE_ELEMENTS)
    managed = paged(engine, plain.clone(), kind="parameter")
    torch._foreach_mul_([managed], 3.0)
    assert engine.has_pending_work(managed)
    engine.install_allocator()
    pins, small = fill(engine)
    pins.pop().release()
    engine.flush()
    engine.remove_allocator()
    assert digest(managed) == digest(plain * 3.0)
    del pins, small
