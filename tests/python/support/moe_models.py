"""Tiny mixtures of experts, one of each layout that transformers has, and what their experts are worth coded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from torch_offload.moe.layouts import FusedExperts, SwitchExperts, experts_of
from torch_offload.moe.modules import DOWN, UP
from torch_offload.moe.ternary import TernaryMatrix

VOCABULARY = 256
HIDDEN = 64
EXPERT = 48
EXPERTS = 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": EXPERT,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
_SPLIT = {"moe_intermediate_size": EXPERT, "decoder_sparse_step": 1}
_DEEPSEEK = {
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=EXPERTS),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_COMMON, **_SPLIT, num_experts=EXPERTS, shared_expert_intermediate_size=EXPERT
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_SPLIT, num_experts=EXPERTS, head_dim=16),
    "olmoe": lambda: OlmoeConfig(**_COMMON, num_experts=EXPERTS),
    "deepseek_v2": lambda: DeepseekV2Config(**_COMMON | _DEEPSEEK),
    "deepseek_v3": lambda: DeepseekV3Config(**_COMMON | _DEEPSEEK),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_COMMON, moe_intermediate_size=EXPERT, n_routed_experts=EXPERTS, n_shared_experts=1, first_k_dense_replace=1
    ),
    "gpt_oss": lambda: GptOssConfig(**_COMMON, num_local_experts=EXPERTS, head_dim=16),
    "granite_moe": lambda: GraniteMoeConfig(**_COMMON, num_local_experts=EXPERTS),
    "switch": lambda: SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=EXPERT,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=EXPERTS,
        expert_capacity=4,
        decoder_start_token_id=0,
    ),
}


def tiny_moe(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a seeded model in evaluation mode, its experts large enough to matter.

    Args:
        name: A key of ``CONFIGS``.
        dtype: Of its weights.
        seed: Of its weights.
        changes: To its configuration.
    """
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    if name == "switch":
        model = SwitchTransformersForConditionalGeneration(config).to(dtype)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for experts in experts_of(model):
            for expert in range(experts.shapes.count):
                for matrix in (UP, DOWN):
                    weight = experts.weight(expert, matrix)
                    weight.copy_(torch.randn(weight.shape) * weight.shape[1] ** -0.5)
    return model.eval()


def inputs_of(model: nn.Module, *, rows: int = 2, tokens: int = 12, seed: int = 5) -> dict[str, Tensor]:
    """Tokens to evaluate a model at."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}


def dequantize(model: nn.Module, rounded: Callable[[Tensor], list[TernaryMatrix]]) -> None:
    """Put into a model's experts what coding makes of them, as ordinary weights."""
    with torch.no_grad():
        for experts in experts_of(model):
            assert isinstance(experts, FusedExperts | SwitchExperts)
            for expert in range(experts.shapes.count):
                for matrix in (UP, DOWN):
                    weight = experts.weight(expert, matrix)
                    weight.copy_(sum(term.dense() for term in rounded(weight)))
