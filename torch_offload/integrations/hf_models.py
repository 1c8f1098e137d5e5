"""A model and a batch as a HuggingFace configuration describes them, without weights and without memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_offload.errors import CheckpointError, ConfigError, OffloadError, UnsupportedModelError
from torch_offload.integrations.quantized_models import quantization_of, quantize_on_meta

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CONFIGURATION = ("config.json",)
_CODE = ("*.py",)
_PICKLES = ("*.bin",)
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def files_of(*, trust_remote_code: bool, pickled_weights: bool) -> tuple[str, ...]:
    """Return patterns of the files of a repository of the hub that are needed to load its model."""
    return _MODEL_FILES + (_CODE if trust_remote_code else ()) + (_PICKLES if pickled_weights else ())


def model_folder(model: str | os.PathLike[str], *, files: tuple[str, ...] = _MODEL_FILES) -> Path:
    """Return the folder of a model: `model` itself, or the cached copy of a repository of the hub.

    What the cache lacks is downloaded, with a progress bar on a terminal.

    Args:
        model: A folder, or the name of a repository such as ``Qwen/Qwen3-30B-A3B``.
        files: Patterns of the files that are needed of a repository.

    Raises:
        ConfigError: If there is neither. The message says why the repository cannot be had.
    """
    path = Path(model)
    if path.is_dir():
        return path
    with _transformers_needed("downloading a model"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    try:
        return Path(snapshot_download(os.fspath(model), allow_patterns=list(files)))
    except HFValidationError:
        raise ConfigError(f"there is no folder {path}; give the folder of a model, or its name on the hub") from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"there is no folder {path}, and no such repository on the hub ({reason}); give the folder of a model, or "
            "its name on the hub"
        ) from None


class DescribedModel(NamedTuple):
    """A model without weights, and which of its tensors its checkpoint has just so.

    Attributes:
        module: On the meta device, in training mode.
        loaded: What will lie in the checkpoint in the dtype that it is asked for in.
    """

    module: nn.Module
    loaded: list[Tensor]


def model_from(
    model: str | os.PathLike[str],
    *,
    dtype: str,
    uses_checkpointing: bool,
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
) -> DescribedModel:
    """Return the language model of a configuration on the meta device, in training mode.

    Args:
        model: A model's folder, its ``config.json``, or its name on the hub.
        dtype: Of its parameters, such as ``bfloat16``.
        uses_checkpointing: Whether layers run again in the backward pass.
        load_in_4bit: Whether bitsandbytes quantizes it as it is loaded, where the configuration does not say how.
        trust_remote_code: Run code that lies beside the configuration.

    Raises:
        ConfigError: If there is no such configuration, or transformers is missing.
        UnsupportedModelError: If it is of a model quantized otherwise, of none that transformers knows, or of one
            whose code would have to be run.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not known; there are: {', '.join(DTYPES)}")
    file = Path(model)
    if not file.is_file():
        file = model_folder(model, files=_CONFIGURATION + (_CODE if trust_remote_code else ())) / "config.json"
    if not file.is_file():
        raise ConfigError(f"there is no model configuration at {file}; give a model's folder or its config.json")
    with _transformers_needed("reading a model's configuration"):
        from transformers import AutoConfig, AutoModelForCausalLM
    try:
        # Code is found beside a folder's configuration only.
        source = file.parent if trust_remote_code and file.name == "config.json" else file
        configuration = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
        quantization = quantization_of(configuration, load_in_4bit=load_in_4bit, dtype=DTYPES[dtype], source=file)
        configuration.use_cache = False
        stored_dtype = getattr(configuration, "dtype", None) or torch.float32
        with torch.device("meta"):
            planned = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                configuration, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
            )
    except OffloadError:
        raise
    except (ValueError, KeyError, OSError) as error:
        _refuse_code(file.parent, error)
        raise UnsupportedModelError(f"{file} describes no language model that transformers knows: {error}") from None
    if quantization is not None:
        quantize_on_meta(planned, quantization)
    planned.train()
    if uses_checkpointing:
        planned.gradient_checkpointing_enable({"use_reentrant": False})
    is_stored_so = str(stored_dtype).removeprefix("torch.") == dtype
    stored: list[Tensor] = [  # the others are made
        parameter for parameter in planned.parameters() if type(parameter) is nn.Parameter
    ]
    return DescribedModel(planned, stored if is_stored_so else [])


def _refuse_code(folder: Path, error: Exception) -> None:
    """Name the remedy where transformers would have to run code of a folder.

    Raises:
        UnsupportedModelError: If the error is of that kind.
    """
    if "trust_remote_code" in str(error):
        raise UnsupportedModelError(
            f"the model in {folder} needs code of its own, which was not run; read that code, then give "
            "--trust-remote-code if you trust it"
        ) from None


def loaded_model(path: Path, *, trust_remote_code: bool = False, pickled_weights: bool = False) -> nn.Module:
    """Return a saved model with its weights, in the type they are stored in.

    Args:
        path: Its folder.
        trust_remote_code: Run code of the folder.
        pickled_weights: Also read weights that are pickles.

    Raises:
        ConfigError: If there is none at `path`, or transformers is missing.
        UnsupportedModelError: If code of the folder would have to be run.
        CheckpointError: If a file of it is damaged or of other shapes.
        OffloadError: As it is raised while tensors are paged, such as OutOfTierMemory.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"there is no model configuration at {path / 'config.json'}; give the folder of a model")
    with _transformers_needed("loading a model"):
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    try:
        configuration = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        auto = AutoModelForSeq2SeqLM if configuration.is_encoder_decoder else AutoModelForCausalLM
        model: nn.Module = auto.from_pretrained(
            str(path),
            dtype="auto",
            trust_remote_code=trust_remote_code,
            use_safetensors=None if pickled_weights else True,
        )
    except OffloadError:
        raise
    except OSError as error:
        if pickled_weights or any(path.glob("*.safetensors")):
            raise
        raise CheckpointError(
            f"{path} has no weights in safetensors ({error}); convert them, or give --pickled-weights if you trust "
            "who wrote them"
        ) from None
    except SafetensorError as error:
        raise CheckpointError(f"{_damaged_file(path)} is damaged: {error}; copy or download it again") from None
    except (ValueError, KeyError, RuntimeError) as error:  # the last: tensors of other shapes than the configuration's
        _refuse_code(path, error)
        raise CheckpointError(f"{path} holds no model that transformers can load: {error}") from None
    return model


@contextmanager
def _transformers_needed(purpose: str) -> Iterator[None]:
    """Turn a failed import into a ConfigError that names what to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{purpose} needs transformers: pip install transformers ({error})") from None


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
