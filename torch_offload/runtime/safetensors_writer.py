"""Writing safetensors files of tensors that are not in memory, the same bytes as the library writes.

The library takes addresses and hands them to ``write``, which fails on an absent page. So the library lays out the
header, from stand-ins without bytes, and each tensor is brought, appended and let go in that order. The file appears
under its name only when it is complete and on the disk.
"""

import ctypes
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from torch_offload import _C
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.system.atomic_files import appearing, readable_path
from torch_offload.system.direct_file import DirectFile

AHEAD_SHARE = 8
"""Tensors that are read ahead of their turn take one part in so many of the budget."""
_LENGTH_BYTES = 8
_HEADER_UNIT_BYTES = 8


class PointedTensors(dict[str, Any]):
    """The library's entries for its writer, and their tensors."""

    def __init__(self, pointers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(pointers)
        self.tensors = dict(tensors)


def install(patches: Patches, *, budget_bytes: int, check: Callable[[], None]) -> None:
    """Replace the two functions that every ``save_file`` goes through, looked up by the library at each call."""
    if not hasattr(safetensors.torch, "_flatten_as_ptr"):
        return  # a library that copies the bytes by itself: addresses that are read in user space fault and are safe
    patches.replace(replaced_functions.SAFETENSORS_POINTERS, _remember_tensors)
    patches.replace(replaced_functions.SAFETENSORS_WRITER, functools.partial(_write_file, budget_bytes, check))


def _remember_tensors(original: Callable[..., Any], tensors: Any, *args: Any) -> Any:
    return PointedTensors(original(tensors, *args), tensors)


def _write_file(
    budget_bytes: int,
    check: Callable[[], None],
    original: Callable[..., Any],
    pointed: Any,
    filename: Any,
    metadata: Mapping[str, str] | None = None,
) -> Any:
    is_ours = isinstance(pointed, PointedTensors)
    if not is_ours or not any(_C.is_managed(tensor) for tensor in pointed.tensors.values()):
        return original(pointed, filename, metadata=metadata)
    check()
    stream_file(pointed.tensors, Path(os.path.realpath(filename)), metadata, budget_bytes=budget_bytes)
    return None


def stream_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str] | None,
    *,
    budget_bytes: int,
    alignment_bytes: int = _HEADER_UNIT_BYTES,
) -> None:
    """Write a safetensors file with one tensor at a time in memory.

    Args:
        tensors: Contiguous, by name.
        path: Appears complete and synced, or not at all.
        metadata: As the library takes it.
        budget_bytes: Of the engine; blocks and reading ahead take a share.
        alignment_bytes: Where the first tensor begins, a multiple of this. Spaces behind the header see to it.

    Raises:
        OSError: As from writing any file. An earlier file at `path` is as it was.
    """
    header, names = lay_out(tensors, metadata, alignment_bytes=alignment_bytes)
    first = ctypes.create_string_buffer(header, len(header))
    size_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    with appearing(path) as descriptor:
        with DirectFile(descriptor, size_bytes=size_bytes, budget_bytes=budget_bytes) as file:
            file.append(ctypes.addressof(first), len(header))
            _append_all(file, [tensors[name] for name in names], ahead_bytes=budget_bytes // AHEAD_SHARE)
            file.finish()
        _check_header(descriptor)


def _check_header(descriptor: int) -> None:
    """Have the library agree with the header, without torch: where that cannot map a file, it keeps it open for ever.

    Raises:
        OSError: If the file cannot be opened or mapped.
    """
    with safetensors.safe_open(readable_path(descriptor), framework="numpy"):
        pass


def lay_out(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    *,
    alignment_bytes: int = _HEADER_UNIT_BYTES,
) -> tuple[bytes, list[str]]:
    """Return the first bytes of a file, up to the tensors' own, and the order of these.

    Order, spelling and metadata are the library's, of tensors of these names and types without elements.
    """
    stand_ins = {
        name: safetensors.TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=[0], data_ptr=0, data_len=0)
        for name, tensor in tensors.items()
    }
    laid_out = bytes(safetensors.serialize(stand_ins, metadata=None if metadata is None else dict(metadata)))
    header = json.loads(laid_out[_LENGTH_BYTES:])
    names = [name for name in header if name != "__metadata__"]
    begin = 0
    for name in names:
        tensor = tensors[name]
        header[name] |= {"shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment_bytes)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, names


def _append_all(file: DirectFile, tensors: list[torch.Tensor], *, ahead_bytes: int) -> None:
    """Append tensors, each while the next ones are read. What was not in memory before is not there afterwards."""
    begun: list[bool] = []  # of the tensors whose turn is near: whether they were in memory before
    waiting_bytes = 0
    for position, tensor in enumerate(tensors):
        while len(begun) < len(tensors) and (len(begun) <= position or waiting_bytes < ahead_bytes):
            following = tensors[len(begun)]
            begun.append(_begin_reading(following))
            waiting_bytes += following.nbytes
        waiting_bytes -= tensor.nbytes
        engine = _C.engine_of(tensor)
        if engine is None:
            file.append(tensor.data_ptr(), tensor.nbytes)
            continue
        with engine.pin(tensor):
            file.append(tensor.data_ptr(), tensor.nbytes)
        if not begun[position]:
            engine.evict(tensor)


def _begin_reading(tensor: torch.Tensor) -> bool:
    """Have a tensor read that is not in memory; returns whether it is."""
    engine = _C.engine_of(tensor)
    if engine is None or engine.is_resident(tensor):
        return True
    engine.prefetch(tensor)
    return False
