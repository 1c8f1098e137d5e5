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
        ConfigError: If there is no such configuration, it is of a quantized model, or transformers is missing. The
            message says which.
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
        for part in (configuration, configuration.get_text_config(decoder=True)):
            said = getattr(part, "quantization_config", None)
            if said is not None:
                method = said.get("quant_method") if isinstance(said, dict) else said
                raise ConfigError(f"{file} is of a quantized model ({method}); only plain ones can be planned")
        configuration.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                configuration, dtype=DTYPES[dtype]
            )
    except ConfigError:
        raise
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{file} describes no language model that transformers knows: {error}") from None
    model.train()
    if uses_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def loaded_model(path: Path) -> nn.Module:
    """Return a saved model with its weights, in the type they are stored in.

    Raises:
        ConfigError: If there is none at `path`, a file of it is damaged or of other shapes, or transformers is missing.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"there is no model at {path}; give the folder of a saved model")
    try:
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    except ImportError as error:
        raise ConfigError(f"loading a model needs transformers: pip install transformers ({error})") from None
    try:
        is_encoder_decoder = AutoConfig.from_pretrained(str(path)).is_encoder_decoder
        auto = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
        model: nn.Module = auto.from_pretrained(str(path), dtype="auto")
    except SafetensorError as error:
        raise ConfigError(f"{_damaged_file(path)} is damaged: {error}; copy or download it again") from None
    except (ValueError, KeyError, RuntimeError) as error:  # the last: tensors of other shapes than the configuration's
        raise ConfigError(f"{path} holds no model that transformers can load: {error}") from None
    return model


def _damaged_file(path: Path) -> Path:
    """The first file of a folder that does not open, or the folder if all do."""
    import safetensors

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safetensors.safe_open(str(file), framework="pt"):
                pass
        except safetensors.SafetensorError:
            return file
    return path


def batch_of(rows: int, tokens: int) -> dict[str, Tensor]:
    """Return what a language model is trained on: so many rows of so many tokens.

    Raises:
        ConfigError: If one of them is not positive.
    """
    if rows < 1 or tokens < 1:
        raise ConfigError(f"batch and sequence must be at least 1, got {rows} and {tokens}")
    return {name: torch.ones(rows, tokens, dtype=torch.long) for name in ("input_ids", "labels")}
