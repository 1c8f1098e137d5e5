"""A model and a batch as a HuggingFace configuration describes them, without weights and without memory."""

from pathlib import Path

import torch
from torch import Tensor, nn

from torch_offload.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_from(path: Path, *, dtype: str, uses_checkpointing: bool) -> nn.Module:
    """Return the language model of a configuration on the meta device, in training mode.

    Args:
        path: A model's directory, or its ``config.json``.
        dtype: Of its parameters, such as ``bfloat16``.
        uses_checkpointing: Whether layers run again in the backward pass.

    Raises:
        ConfigError: If there is no such configuration, or transformers is missing. The message says which.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not known; there are: {', '.join(DTYPES)}")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no model configuration at {file}; give a model's directory or its config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"reading a model's configuration needs transformers: pip install transformers ({error})"
        ) from None
    try:
        configuration = AutoConfig.from_pretrained(str(file))
        configuration.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                configuration, dtype=DTYPES[dtype]
            )
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{file} describes no language model that transformers knows: {error}") from None
    model.train()
    if uses_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def batch_of(rows: int, tokens: int) -> dict[str, Tensor]:
    """Return what a language model is trained on: so many rows of so many tokens.

    Raises:
        ConfigError: If one of them is not positive.
    """
    if rows < 1 or tokens < 1:
        raise ConfigError(f"batch and sequence must be at least 1, got {rows} and {tokens}")
    return {name: torch.ones(rows, tokens, dtype=torch.long) for name in ("input_ids", "labels")}
