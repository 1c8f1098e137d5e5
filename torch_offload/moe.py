"""Mixture-of-experts models with coded experts; see docs/coded-experts.md.

Imported when transformers opens the first folder of such a model, or by who codes one. It has transformers run them,
and PEFT put adapters on them.
"""

import importlib.util

from torch_offload.coded_files import save
from torch_offload.expert_modules import code_experts, experts_of

if importlib.util.find_spec("peft"):
    from torch_offload import coded_lora as coded_lora

__all__ = ["code_experts", "experts_of", "save"]
