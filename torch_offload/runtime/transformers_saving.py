"""Saving fused experts: transformers writes them one by one, as they were stored, and copies them apart for that.

The copies of a whole model would be beside the budget's pages. Each becomes pages itself as soon as it is made.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_offload import _C
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches, replaced
from torch_offload.runtime.eligibility import why_not_pageable


def install(patches: Patches, engine: _C.Engine) -> bool:
    """Replace the function that takes weights apart for a file; returns whether transformers is there."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not hasattr(models, "revert_weight_conversion"):
        return False
    patches.replace(replaced_functions.TRANSFORMERS_REVERT, functools.partial(_revert_in_pages, engine))
    return True


def _revert_in_pages(engine: _C.Engine, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    loading = sys.modules.get("transformers.core_model_loading")
    if not hasattr(loading, "WeightConverter"):
        return original(*args, **options)
    with replaced(replaced_functions.TRANSFORMERS_CONVERT, functools.partial(_convert_in_pages, engine)):
        return original(*args, **options)


def _convert_in_pages(engine: _C.Engine, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    converted = original(*args, **options)
    for name, value in converted.items():
        tensor = value[0] if isinstance(value, list) else value
        if isinstance(tensor, torch.Tensor) and why_not_pageable(tensor) is None:
            engine.manage(tensor, kind="other", label=f"{name} in a file")
    return converted
