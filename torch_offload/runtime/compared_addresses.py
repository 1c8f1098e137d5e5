"""Functions that compare addresses, to find out which tensors of a file share memory: on a GPU a page has one while it
is pinned.

On the host they fetch nothing, since addresses stay. Nothing is read or written by them there either.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import safetensors.torch
import torch

from torch_offload import _C
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches


def install(patches: Patches) -> None:
    """Replace those of safetensors."""
    if hasattr(safetensors.torch, "_filter_shared_not_shared"):
        patches.replace(replaced_functions.SAFETENSORS_SHARED, _list_of_sets)
        patches.replace(replaced_functions.SAFETENSORS_COMPLETE, _of_tensor)


def install_for_transformers(patches: Patches) -> None:
    """Replace those of transformers, which has been imported."""
    if hasattr(sys.modules["transformers.modeling_utils"], "_find_disjoint"):
        patches.replace(replaced_functions.TRANSFORMERS_DISJOINT, _pair_of_sets)
        patches.replace(replaced_functions.TRANSFORMERS_IDENTICAL, _pair_of_sets)


def _of_tensor(original: Callable[..., Any], tensor: torch.Tensor) -> Any:
    with _held([tensor]):
        return original(tensor)


def _list_of_sets(
    original: Callable[..., Any], tensors: Sequence[set[str]], state_dict: Mapping[str, Any]
) -> list[set[str]]:
    return list(chain.from_iterable(_one_by_one(original, tensors, state_dict)))


def _pair_of_sets(
    original: Callable[..., Any], tensors: Sequence[set[str]], state_dict: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    answers = _one_by_one(original, tensors, state_dict)
    first, second = zip(*answers, strict=True) if answers else ((), ())
    return list(chain.from_iterable(first)), list(chain.from_iterable(second))


def _one_by_one(original: Callable[..., Any], tensors: Sequence[set[str]], state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the answers for each set of names, whose tensors share one storage: only that has to fit."""
    answers = []
    for names in tensors:
        with _held([state_dict[name] for name in names] if len(names) > 1 else []):
            answers.append(original([names], state_dict))
    return answers


def _held(tensors: Sequence[Any]) -> ExitStack:
    """Return a context in which the tensors have addresses."""
    pins = ExitStack()
    try:
        for tensor in tensors:
            engine = _C.engine_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if engine is not None:
                pins.enter_context(engine.pin(tensor, read_only=True))
    except BaseException:
        pins.close()
        raise
    return pins
