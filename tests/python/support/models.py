"""Tiny models of six architectures, made from their configurations: small, but with every part of the real ones."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

VOCABULARY = 256
LAYERS = {"mixtral": 6}
LORA_TARGETS = {"gpt2": ["c_attn"], "bert": ["query", "value"]}


def tiny_config(name: str, *, tied: bool, hidden: int, layers: int) -> PretrainedConfig:
    """Return the configuration of the architecture `name`."""
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    if name == "gpt2":
        return GPT2Config(**common, n_embd=hidden, n_layer=layers, n_head=4, n_positions=64)
    common |= {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    common |= {"intermediate_size": 2 * hidden, "max_position_embeddings": 64}
    if name == "bert":
        return BertConfig(**common)
    common |= {"num_key_value_heads": 2}
    if name == "llama":
        return LlamaConfig(**common)
    if name == "qwen3":
        return Qwen3Config(**common, head_dim=hidden // 4)
    if name == "gemma":
        return GemmaConfig(**common, head_dim=hidden // 4)
    if name == "mixtral":
        common["intermediate_size"] = hidden // 2
        return MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    raise ValueError(f"no tiny model of the name {name!r}")


def tiny_model(
    name: str,
    *,
    tied: bool,
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
    hidden: int = 128,
    layers: int | None = None,
) -> torch.nn.Module:
    """Return a seeded model in training mode, with adapters on its attention where `lora` is set."""
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    layers = layers or LAYERS.get(name, 4)
    model = auto.from_config(tiny_config(name, tied=tied, hidden=hidden, layers=layers), dtype=dtype)
    if lora:
        targets = LORA_TARGETS.get(name, ["q_proj", "v_proj"])
        adapters = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


def state_bytes(model: torch.nn.Module, *, moments: int) -> int:
    """Bytes of all parameters, and of gradients and `moments` optimizer states of the trainable ones."""
    total = sum(weight.nbytes for weight in model.parameters())
    return total + (1 + moments) * sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
