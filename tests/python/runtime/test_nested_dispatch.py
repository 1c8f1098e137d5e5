"""Operators that a tensor subclass written in Python calls on paged tensors inside of it: there torch leaves out every
key above Python, and what was not brought would be fetched by faults.

Method: the same calls on a subclass around ordinary memory and around pages that have left; counters show that the
calls themselves brought them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import digest
from torch import Tensor
from torch.utils._pytree import tree_map

from torch_offload import _C

ELEMENTS = 1 << 18
BUDGET_BYTES = 16 << 20


class Around(Tensor):
    """A tensor that has no memory of its own, as those of DTensor and torchao have none."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Around":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = tree_map(lambda value: value.inner if isinstance(value, Around) else value, (args, kwargs or {}))
        result = function(*inside[0], **inside[1])
        return tree_map(lambda value: Around(value) if isinstance(value, Tensor) else value, result)


def add_in_place(tensors: list[Around]) -> None:
    tensors[0].add_(tensors[1], alpha=0.5)


def composite_kernel(tensors: list[Around]) -> Tensor:
    return torch.zeros_like(tensors[0]) + tensors[0].clone()


def list_operator(tensors: list[Around]) -> None:
    torch._foreach_mul_(tensors, 0.5)


def norms(tensors: list[Around]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors))


def fused_step(tensors: list[Around]) -> None:
    torch._fused_adamw_(
        [tensors[0]],
        [tensors[1]],
        [tensors[2]],
        [tensors[3]],
        [],
        [torch.ones(())],
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.01,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


CALLS = [add_in_place, composite_kernel, list_operator, norms, fused_step]


def numbers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(ELEMENTS, generator=generator) for _ in range(4)]


def bits_after(call: Callable[[list[Around]], Any], tensors: list[Tensor]) -> list[str]:
    with torch.no_grad():
        results = call([Around(tensor) for tensor in tensors])
        results = [results] if isinstance(results, Tensor) else results or []
        return [digest(tensor) for tensor in (*tensors, *(result.inner for result in results))]


def new_engine(folder: Path) -> _C.Engine:
    return _C.Engine(
        budget_bytes=BUDGET_BYTES,
        directories=[str(folder)],
        io_engine="auto",
        queue_depth=8,
        page_elements=1 << 14,
        min_paged_bytes=0,
    )


@pytest.fixture
def engine(tmp_path: Path) -> _C.Engine:
    return new_engine(tmp_path)


def calls_that_paged(engine: _C.Engine) -> int:
    statistics = engine.statistics()
    return int(statistics["fallback_calls"] + statistics["recorded_elements"])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_a_subclass_calls_brings_its_pages(call: Callable[[list[Around]], Any], engine: _C.Engine) -> None:
    expected = bits_after(call, numbers())
    paged = numbers()
    for index, tensor in enumerate(paged):
        assert engine.manage(tensor, kind="parameter", label=f"tensor {index}")
        assert engine.evict(tensor) == 0
    before = calls_that_paged(engine)
    assert bits_after(call, paged) == expected
    assert engine.statistics()["faults"] == 0
    assert calls_that_paged(engine) - before > len(paged), "more than the comparison at the end makes"


def test_composite_kernels_do_not_hide_the_fallback(engine: _C.Engine) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = [name for name in torch._C._dispatch_get_all_op_names() if has(name, "CompositeExplicitAutograd")]
    assert len(composite) > 1000
    assert [name for name in composite if not has(name, "CustomRNGKeyId")] == []


def test_operators_of_a_later_library_are_covered_by_the_next_engine(tmp_path: Path) -> None:
    library = torch.library.Library("nested_dispatch_test", "DEF")
    library.define("twice(Tensor value) -> Tensor")
    library.impl("twice", lambda value: value * 2, "CompositeExplicitAutograd")
    new_engine(tmp_path)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("nested_dispatch_test::twice", "CustomRNGKeyId")
