"""Mixture-of-experts models with coded experts; see docs/concepts/coded-experts.md.

Imported when transformers opens the first folder of such a model, or by who codes one. It has transformers run them,
and PEFT put adapters on them.
"""

import importlib.util

from torch_offload.moe.checkpoint import save
from torch_offload.moe.layouts import code_experts, experts_of

if importlib.util.find_spec("peft"):
    from torch_offload.moe import lora as lora

__all__ = ["code_experts", "experts_of", "save"]
