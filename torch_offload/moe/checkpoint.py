"""Folders of models with coded experts, as ``from_pretrained`` reads and :func:`save` writes them.

Such a folder is an ordinary one of transformers, with a ``quantization_config`` in config.json. Coded blobs lie in
safetensors files of their own, each blob on a multiple of 4 KiB, so that it can be read by one direct read.
"""

import json
import os
import re
import reprlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_offload.config import parse_size
from torch_offload.errors import CheckpointError, ConfigError
from torch_offload.hooks import replaced_functions
from torch_offload.moe.folder_format import FORMAT_VERSION, QUANT_METHOD
from torch_offload.moe.layouts import CODED, experts_of, read_ahead
from torch_offload.moe.modules import ACTIVE_PLANES, CodedExperts, CodedPlane
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.safetensors_writer import stream_file
from torch_offload.system.atomic_files import write_whole

BLOB_ALIGNMENT_BYTES = 4096
_MAX_BLOB_BYTES = 1 << 40

_BLOB = re.compile(rf"\.{CODED}\.planes\.\d+\.blob_\d+$")
_WRITE_BUFFER_BYTES = 64 << 20


class CodedExpertsConfig(QuantizationConfigMixin):
    """The entry for coded experts in config.json."""

    def __init__(
        self, /, *, experts: Any = None, coded_format: Any = FORMAT_VERSION, planes: Any = "all", **other: Any
    ) -> None:
        """Check what the file says, which may be anything.

        Args:
            experts: By the module's name, the bytes of each blob: ``{"blob_bytes": [[of plane 0], ...]}``.
            coded_format: Of the folder, a number.
            planes: See ``CodedExperts.active_planes``.
            **other: What a later version may add.

        Raises:
            CheckpointError: If the format is not known, or something is not what it has to be. The message names it.
        """
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # registered methods are strings
        if coded_format != FORMAT_VERSION:
            raise CheckpointError(
                f"expected coded experts of format {FORMAT_VERSION}, got format {reprlib.repr(coded_format)}; "
                "install the version of torch_offload that wrote them, or a later one"
            )
        if planes not in ACTIVE_PLANES:
            raise CheckpointError(f"planes: expected one of {', '.join(ACTIVE_PLANES)}, got {reprlib.repr(planes)}")
        if not isinstance(experts, Mapping):
            raise CheckpointError(f"experts: expected a mapping of modules to blob sizes, got {reprlib.repr(experts)}")
        for name, entry in experts.items():
            _check_sizes(name, entry)
        self.coded_format = coded_format
        self.experts = {name: dict(entry) for name, entry in experts.items()}
        self.planes = planes


def _check_sizes(name: str, entry: Any) -> None:
    planes = entry.get("blob_bytes") if isinstance(entry, Mapping) else None
    has_planes = isinstance(planes, list) and planes and all(isinstance(plane, list) and plane for plane in planes)
    if not has_planes or not all(_is_blob_size(size) for plane in cast(list[list[Any]], planes) for size in plane):
        raise CheckpointError(
            f"experts: blob_bytes of {name}: expected for each plane a list of sizes in multiples of "
            f"{BLOB_ALIGNMENT_BYTES} bytes, got {reprlib.repr(planes)}"
        )


def _is_blob_size(size: Any) -> bool:
    return type(size) is int and 0 < size <= _MAX_BLOB_BYTES and size % BLOB_ALIGNMENT_BYTES == 0


@register_quantizer(QUANT_METHOD)
class CodedExpertsQuantizer(HfQuantizer):
    """Lays out coded experts in a model before transformers reads its files."""

    requires_calibration = True
    quantization_config: CodedExpertsConfig
    _has_laid_out = False

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Called before the model is laid out with dense experts, which the budget need not hold, and after it."""
        if not self._has_laid_out:
            PROCESS.provisional_layers.expect(self)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        self._has_laid_out = True
        PROCESS.provisional_layers.finish(self)
        lay_out(model, self.quantization_config, dtype=model.dtype)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        missing = _names_not_in_files(model)
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors of the model are not in the files, the first {missing[0]}; a part of the "
                "folder is missing: copy it again, or compress the model again"
            )
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Nothing is coded while it is loaded."""
        return False

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters may be trained over it."""
        return True


def _names_not_in_files(model: PreTrainedModel) -> list[str]:
    """Return names of tensors that transformers made up, without the head if a model of another class was saved."""
    has_saved_head = type(model).__name__ in (model.config.architectures or ())
    base = "" if has_saved_head or model.base_model is model else f"{model.base_model_prefix}."
    return [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.startswith(base) and not _is_loaded(tensor) and not may_be_absent(model, name)
    ]


def _is_loaded(tensor: Tensor) -> bool:
    """Whether transformers found it in a file: it marks what it did, and makes up the rest."""
    return bool(getattr(tensor, "_is_hf_initialized", False))


def may_be_absent(model: nn.Module, name: str) -> bool:
    """Whether transformers makes a tensor without a file, as it says of the model's class."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def lay_out(model: nn.Module, config: CodedExpertsConfig, *, dtype: torch.dtype) -> None:
    """Put coded experts without values in place of a model's experts.

    Raises:
        CheckpointError: If the model has no such modules, or they have other counts; the message names the module.
    """
    found = {experts.name: experts for experts in experts_of(model)}
    for name, sizes in config.experts.items():
        experts = found.get(_known_name(name, found))
        if experts is None:
            raise CheckpointError(f"the files have coded experts of {name}, the model has experts in {sorted(found)}")
        shapes = experts.shapes
        for blob_bytes in sizes["blob_bytes"]:
            if len(blob_bytes) != shapes.count:
                raise CheckpointError(f"{name}: the files have {len(blob_bytes)} experts, the model {shapes.count}")
        planes = [CodedPlane(shapes, blob_bytes, dtype=dtype, device="meta") for blob_bytes in sizes["blob_bytes"]]
        coded = CodedExperts(shapes, planes, label=experts.name)
        coded.active_planes = config.planes
        experts.replace(coded)
    read_ahead(model)


def _known_name(name: str, found: Mapping[str, Any]) -> str:
    """The same module's name in a model with or without its head: one ends in the other."""
    ends = [known for known in found if known.endswith(f".{name}") or name.endswith(f".{known}")]
    return name if name in found or not ends else ends[0]


def config_of(model: nn.Module) -> CodedExpertsConfig:
    """Describe a model's coded experts. Their planes are "all" unless all modules use the same others.

    Raises:
        ConfigError: If it has none.
    """
    experts: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, CodedExperts):
            sizes = [
                [plane.blob(expert).numel() for expert in range(module.shapes.count)] for plane in module.all_planes
            ]
            experts[name.removesuffix(f".{CODED}")] = {"blob_bytes": sizes}
    if not experts:
        raise ConfigError("the model has no coded experts; torch_offload.compress(model, ...) makes them")
    active = {module.active_planes for module in model.modules() if isinstance(module, CodedExperts)}
    return CodedExpertsConfig(experts=experts, planes=active.pop() if len(active) == 1 else "all")


def save(
    model: PreTrainedModel, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", **options: Any
) -> None:
    """Write a model with coded experts; ``from_pretrained`` opens the folder once ``torch_offload`` is imported.

    Args:
        model: Of transformers.
        folder: Made if it is not there. What a model of the same kind left there is replaced once everything new is
            complete in a hidden folder inside; files of weights that nothing names any more are deleted last.
        max_shard_size: Of one file.
        options: For ``save_pretrained``, which writes everything but coded blobs.

    Raises:
        ConfigError: If the model has no coded experts.
        OSError: If a file cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.quantization_config = config_of(model)
    state = model.state_dict()
    blobs = {name: state.pop(name) for name in list(state) if _BLOB.search(name)}
    total_bytes = sum(tensor.nbytes for tensor in (*state.values(), *blobs.values()))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".torch_offload-") as unfinished:
        new = Path(unfinished)
        with _without_quantizer(model):
            model.save_pretrained(
                new, state_dict=state, max_shard_size=max_shard_size, save_original_format=False, **options
            )
        weight_map = _write_blobs(blobs, new, shard_bytes=parse_size(max_shard_size))
        _extend_index(new, weight_map, total_bytes=total_bytes)
        _move_files(new, folder)
    named = set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"].values())
    for pattern in ("experts-*-of-*.safetensors", "model-*-of-*.safetensors"):
        for path in folder.glob(pattern):
            if path.name not in named:
                path.unlink()


def _move_files(new: Path, folder: Path) -> None:
    """Replace a model's files by others that are complete. There is no index meanwhile, so that old and new files are
    not taken for one model.
    """
    for older in (folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME):
        older.unlink(missing_ok=True)
    names = sorted(path.name for path in new.iterdir())
    for name in sorted(names, key=lambda name: name == SAFE_WEIGHTS_INDEX_NAME):  # the index is last
        os.replace(new / name, folder / name)


@contextmanager
def _without_quantizer(model: PreTrainedModel) -> Iterator[None]:
    """Have transformers write the tensors it is given: those of a model that it opened it asks the quantizer for."""
    quantizer = vars(model).pop("hf_quantizer", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer


def _write_blobs(blobs: Mapping[str, Tensor], folder: Path, *, shard_bytes: int) -> dict[str, str]:
    """Write blobs to aligned files; returns the file of each."""
    shards: list[dict[str, Tensor]] = [{}]
    free_bytes = shard_bytes
    for name, blob in blobs.items():
        if shards[-1] and blob.nbytes > free_bytes:
            shards.append({})
            free_bytes = shard_bytes
        shards[-1][name] = blob
        free_bytes -= blob.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"experts-{number:05}-of-{len(shards):05}.safetensors"
        stream_file(
            shard,
            folder / file_name,
            {"format": "pt"},
            budget_bytes=_WRITE_BUFFER_BYTES,
            alignment_bytes=BLOB_ALIGNMENT_BYTES,
        )
        weight_map |= dict.fromkeys(shard, file_name)
    return weight_map


def _extend_index(folder: Path, added: Mapping[str, str], *, total_bytes: int) -> None:
    """Have the folder's index name the added tensors too. One file without an index gets the name of a first part."""
    index_path = folder / SAFE_WEIGHTS_INDEX_NAME
    single = folder / SAFE_WEIGHTS_NAME
    if single.exists():
        first = single.with_name("model-00001-of-00001.safetensors")
        os.replace(single, first)
        weight_map = dict.fromkeys(_names_in(first), first.name)
        metadata: dict[str, Any] = {}
    else:
        index = json.loads(index_path.read_text())
        weight_map, metadata = index["weight_map"], index["metadata"]
    metadata["total_size"] = total_bytes
    text = json.dumps({"metadata": metadata, "weight_map": weight_map | dict(added)}, indent=2, sort_keys=True)
    write_whole(index_path, f"{text}\n".encode())


def _names_in(path: Path) -> list[str]:
    with safetensors.safe_open(str(path), framework="pt") as file:
        return list(file.keys())


def _save_pretrained(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **options: Any) -> Any:
    """Have config.json say what the experts are, however they were coded. Blobs lie as they come."""
    if any(isinstance(module, CodedExperts) for module in model.modules()):
        model.config.quantization_config = config_of(model)
    return original(model, *args, **options)


PROCESS.coded_experts.provide(lambda patches: patches.replace(replaced_functions.TRANSFORMERS_SAVE, _save_pretrained))
