"""Coded blocks of a compression that is not finished, kept on disk so that it can go on after it was ended."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from torch_offload.errors import CheckpointError, ConfigError
from torch_offload.moe.modules import CodedExperts, CodedPlane, ExpertShapes, blob_name
from torch_offload.moe.ternary import SCALE_DTYPE
from torch_offload.system.atomic_files import write_whole

logger = logging.getLogger(__name__)

FOLDER = "unfinished"
"""Name of the folder in the output folder."""

_STATE = "state.json"


class ResumeState:
    """A folder with a file for each block, and a list of them with what else is known. Without a path it keeps nothing.

    Whatever is in it counts only if the list names it and its checksum is right; both appear complete or not at all.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        """Open or make the folder.

        Raises:
            ConfigError: If another model, other settings or other texts are there.
        """
        self._folder = folder
        self._state: dict[str, Any] = {"fingerprint": fingerprint, "blocks": []}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state_path = folder / _STATE
        if not state_path.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} holds files of something else; move them, or give another folder")
        if state_path.exists():
            state = _read_state(state_path)
            if state.get("fingerprint") != fingerprint:
                raise ConfigError(
                    f"{folder} is of a compression of another model, or with other settings or texts; delete it, or "
                    "give another folder"
                )
            self._state = state

    def take(self, block: str, shapes: Mapping[str, ExpertShapes]) -> tuple[dict[str, CodedExperts], Any] | None:
        """Return a block's experts by module, and what was kept with them; None unless it is there and undamaged.

        Args:
            block: Its name. Blocks have to be asked for in the order in which they were kept.
            shapes: Of its modules of experts.
        """
        entry = next((entry for entry in self._state["blocks"] if entry["block"] == block), None)
        if entry is None or self._folder is None:
            return None
        path = self._folder / entry["file"]
        content = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            logger.warning("%s is damaged; %s and what follows are coded again", path, block)
            self._state["blocks"] = self._state["blocks"][: self._state["blocks"].index(entry)]
            return None
        tensors = safetensors.torch.load(content)
        return {name: _experts_from(tensors, name, shape) for name, shape in shapes.items()}, entry["kept"]

    def keep(self, block: str, experts: Mapping[str, CodedExperts], kept: Any) -> None:
        """Write a block's experts, and something that JSON can hold with them.

        Raises:
            OSError: If they cannot be written.
        """
        if self._folder is None:
            return
        tensors = {f"{name}.{key}": value for name, coded in experts.items() for key, value in coded.named_buffers()}
        content = safetensors.torch.save(tensors)
        file_name = f"block-{len(self._state['blocks']):05}.safetensors"
        write_whole(self._folder / file_name, content)
        digest = hashlib.sha256(content).hexdigest()
        self._state["blocks"].append({"block": block, "file": file_name, "sha256": digest, "kept": kept})
        write_whole(self._folder / _STATE, f"{json.dumps(self._state, indent=1)}\n".encode())

    def remove(self) -> None:
        """Delete what was kept, and the folder unless somebody put something else there."""
        if self._folder is None:
            return
        for name in (*(entry["file"] for entry in self._state["blocks"]), _STATE):
            (self._folder / name).unlink(missing_ok=True)
        if any(self._folder.iterdir()):
            logger.warning("%s stays: it holds files of something else", self._folder)
        else:
            self._folder.rmdir()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete {path.parent} to begin again") from None
    return state


def _experts_from(tensors: Mapping[str, Tensor], name: str, shapes: ExpertShapes) -> CodedExperts:
    planes: list[CodedPlane] = []
    while f"{name}.planes.{len(planes)}.{blob_name(0)}" in tensors:
        prefix = f"{name}.planes.{len(planes)}."
        blobs = [tensors[prefix + blob_name(expert)] for expert in range(shapes.count)]
        plane = CodedPlane(shapes, [blob.numel() for blob in blobs], dtype=SCALE_DTYPE)
        for key, _ in list(plane.named_buffers()):
            plane.register_buffer(key, tensors[prefix + key])
        planes.append(plane)
    return CodedExperts(shapes, planes, label=name)


def fingerprint_of(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], settings: Mapping[str, Any]) -> str:
    """Return a checksum of all that the result depends on."""
    digest = hashlib.sha256(json.dumps([dict(settings), _configuration_of(model)], sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        _add(digest, name, tensor)
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            _add(digest, name, tensor)
    return digest.hexdigest()


def _configuration_of(model: nn.Module) -> Any:
    """The part of a model's configuration that its results depend on: not its folder, nor its writer."""
    config = getattr(model, "config", None)
    state = json.loads(config.to_json_string(use_diff=False)) if config is not None else None
    return _without(state, ("_name_or_path", "transformers_version"))


def _without(state: Any, names: Sequence[str]) -> Any:
    if isinstance(state, dict):
        return {name: _without(value, names) for name, value in state.items() if name not in names}
    return state


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.numpy())
