"""The calls of the operator sweep: torch's own samples, as calls that can be repeated with arguments paged out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

SAMPLES_PER_OPERATOR = 4
SAMPLES_LOOKED_AT = 300
DIFFERENTIABLE = (torch.float32, torch.complex64, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """A function and its flattened arguments (input, args, kwargs)."""

    name: str
    function: Callable[..., Any]
    leaves: list[Any]
    structure: TreeSpec
    with_grad: bool
    device: str

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], arguments: Any, *, with_grad: bool, device: str) -> "Call":
        leaves, structure = tree_flatten(arguments)
        return cls(name, function, leaves, structure, with_grad, device)

    def copy_leaves(self) -> list[Any]:
        return [duplicate(leaf, with_grad=self.with_grad) if is_tensor(leaf) else leaf for leaf in self.leaves]

    def run(self, leaves: list[Any]) -> Any:
        first, args, kwargs = tree_unflatten(leaves, self.structure)
        return self.function(first, *args, **kwargs)

    def pageable(self) -> list[int]:
        """Positions of the arguments that can be managed."""
        return [
            index
            for index, leaf in enumerate(self.leaves)
            if is_pageable(leaf) and leaf.device.type == self.device  # indices may be on the host
        ]


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def is_pageable(leaf: Any) -> bool:
    if not is_tensor(leaf) or leaf.layout != torch.strided or leaf.is_quantized:
        return False
    return leaf.untyped_storage().nbytes() > 0


def storage_copy(tensor: torch.Tensor) -> torch.UntypedStorage:
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return content.clone().untyped_storage()


def duplicate(tensor: torch.Tensor, *, with_grad: bool) -> torch.Tensor:
    """Copy a tensor with its whole storage, so that strides, offset and overlap stay what they are."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        copy = tensor.detach().clone()
    else:
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(storage_copy(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
    return copy.requires_grad_(with_grad and tensor.requires_grad)


def chosen_dtype(operator: OpInfo, device: str) -> torch.dtype:
    """float32 where the operator has it, otherwise the first of its dtypes by preference."""
    preferred = [torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16]
    supported = operator.supported_dtypes(device)
    return next(dtype for dtype in (*preferred, *supported) if dtype in supported)


def arguments_of(sample: SampleInput) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def samples_of(operator: OpInfo, dtype: torch.dtype, device: str) -> list[SampleInput]:
    """A few of the operator's sample inputs, spread evenly, those with something to page out before the others."""
    torch.manual_seed(0)
    with_grad = operator.supports_autograd and dtype in DIFFERENTIABLE
    found = list(islice(operator.sample_inputs(device, dtype, requires_grad=with_grad), SAMPLES_LOOKED_AT))
    useful = [
        sample for sample in found if any(map(is_pageable, tree_leaves((sample.input, sample.args, sample.kwargs))))
    ]
    choice = useful or found
    stride = max(1, len(choice) // SAMPLES_PER_OPERATOR)
    return choice[::stride][:SAMPLES_PER_OPERATOR]


def poisoned_like(result: Any) -> Any:
    """Tensors to write `result` into, full of something else."""
    return tree_map(lambda leaf: torch.ones_like(leaf) if is_tensor(leaf) else leaf, result)


def calls_of(operator: OpInfo, device: str) -> Iterator[Call]:
    """Each sample as a call with gradients, in place, and into given results, as far as the operator has these."""
    for number, sample in enumerate(samples_of(operator, chosen_dtype(operator, device), device)):
        arguments = arguments_of(sample)
        name = f"{operator.formatted_name}[{number}]"
        call = Call.of(name, operator.op, arguments, with_grad=operator.supports_autograd, device=device)
        yield call
        if operator.inplace_variant is not None and not sample.broadcasts_input:
            yield Call.of(f"{name} in place", operator.inplace_variant, arguments, with_grad=False, device=device)
        if operator.supports_out:
            yield from call_with_out(call, operator, sample)


def call_with_out(call: Call, operator: OpInfo, sample: SampleInput) -> Iterator[Call]:
    without_grad = replace(call, with_grad=False)
    try:
        torch.manual_seed(0)
        result = without_grad.run(without_grad.copy_leaves())
    except (IndexError, RuntimeError, TypeError, ValueError):
        return  # its error is compared in the call without `out`
    first, args, kwargs = arguments_of(sample)
    arguments = (first, args, kwargs | {"out": poisoned_like(result)})
    yield Call.of(f"{call.name} out", operator.op, arguments, with_grad=False, device=call.device)
