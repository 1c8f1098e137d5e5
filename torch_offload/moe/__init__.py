"""Experts stored as coded ternary planes: operators, modules, checkpoints, adapters.

Experimental: may change in a minor release. docs/concepts/coded-experts.md has the method. The names below need
transformers, imported with the first of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_offload.moe.activate import code_experts as code_experts
    from torch_offload.moe.activate import experts_of as experts_of
    from torch_offload.moe.activate import save as save
else:

    def __getattr__(name: str) -> Any:
        """Import what needs transformers only when it is asked for."""
        if name in __all__:
            return getattr(importlib.import_module("torch_offload.moe.activate"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["code_experts", "experts_of", "save"]
