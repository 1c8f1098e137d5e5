"""Writing safetensors files of tensors that are not in memory, through the library's own writer.

The library takes addresses and hands them to ``write``, which fails on an absent page. Tensors that fit in half of
the budget are pinned together. Otherwise the library writes the file over addresses that read as zeros, which fixes
header, order and padding, and each tensor's bytes are then streamed into their place. The file appears under its name
only when it is complete.
"""

import ctypes
import functools
import json
import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torch_offload import _C
from torch_offload.errors import OffloadError
from torch_offload.patches import Patches

PIECE_BYTES = 16 << 20
_HEADER_LENGTH_BYTES = 8


class PointedTensors(dict[str, Any]):
    """What the library made of the tensors for its writer, and the tensors."""

    def __init__(self, pointers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(pointers)
        self.tensors = dict(tensors)


def install(patches: Patches, *, budget_bytes: int) -> None:
    """Replace the two functions that every ``save_file`` goes through, looked up by the library at each call."""
    if not hasattr(safetensors.torch, "_flatten_as_ptr"):
        return  # a library that copies the bytes by itself: addresses that are read in user space fault and are safe
    patches.replace(safetensors.torch, "_flatten_as_ptr", _remember_tensors)
    patches.replace(safetensors.torch, "serialize_file", functools.partial(_write_file, budget_bytes // 2))


def _remember_tensors(original: Callable[..., Any], tensors: Any, *args: Any) -> Any:
    return PointedTensors(original(tensors, *args), tensors)


def _write_file(
    at_once_bytes: int, original: Callable[..., Any], pointed: Any, filename: Any, *args: Any, **options: Any
) -> Any:
    paged = _paged_tensors(pointed) if isinstance(pointed, PointedTensors) else {}
    if not paged:
        return original(pointed, filename, *args, **options)
    if sum(pointed.tensors[name].nbytes for name in paged) <= at_once_bytes:
        with ExitStack() as pins:
            for name, engine in paged.items():
                pins.enter_context(engine.pin(pointed.tensors[name]))
            return original(pointed, filename, *args, **options)

    def write(pointers: Mapping[str, Any], path: str) -> Any:
        return original(pointers, path, *args, **options)

    return stream_file(write, pointed, paged, Path(os.path.realpath(filename)))


def _paged_tensors(pointed: PointedTensors) -> dict[str, _C.Engine]:
    engines = ((name, _C.engine_of(tensor)) for name, tensor in pointed.tensors.items())
    return {name: engine for name, engine in engines if engine is not None}


def stream_file(
    write: Callable[[Mapping[str, Any], str], Any],
    pointed: PointedTensors,
    paged: Mapping[str, _C.Engine],
    path: Path,
) -> Any:
    """Write a safetensors file at `path` with at most one paged tensor in memory.

    Args:
        write: The library's writer: pointers by name, path.
        pointed: What is to be written.
        paged: The engine of each tensor that is not ordinary memory.
        path: Appears complete and synced, or not at all.

    Raises:
        OSError: As from writing any file.
        OffloadError: If the library's file does not have the layout that the tensors need.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        result = _write_layout(write, pointed, paged, str(partial))
        with open(partial, "r+b") as file:
            places = _places(file.fileno())
            for name, engine in paged.items():
                _write_tensor(file.fileno(), engine, pointed.tensors[name], name, places)
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return result


def _write_layout(
    write: Callable[[Mapping[str, Any], str], Any], pointed: PointedTensors, paged: Mapping[str, _C.Engine], path: str
) -> Any:
    """Let the library write the file with zeros where paged tensors go. Untouched pages read as zeros for free."""
    with mmap.mmap(-1, max(pointed.tensors[name].nbytes for name in paged)) as zeros:
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(zeros))
        pointers = dict(pointed)
        for name in paged:
            tensor = pointed.tensors[name]
            pointers[name] = safetensors.TensorSpec(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                data_ptr=address,
                data_len=tensor.nbytes,
            )
        return write(pointers, path)


def _places(file: int) -> dict[str, tuple[int, int]]:
    """Return offset and size in bytes of every tensor in a safetensors file, from its header."""
    header_bytes = int.from_bytes(os.pread(file, _HEADER_LENGTH_BYTES, 0), "little")
    header = json.loads(os.pread(file, header_bytes, _HEADER_LENGTH_BYTES))
    first = _HEADER_LENGTH_BYTES + header_bytes
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (first + begin, end - begin) for name, (begin, end) in spans.items()}


def _write_tensor(
    file: int, engine: _C.Engine, tensor: torch.Tensor, name: str, places: Mapping[str, tuple[int, int]]
) -> None:
    offset, size_bytes = places.get(name, (0, -1))
    if size_bytes != tensor.nbytes:
        raise OffloadError(f"safetensors left {size_bytes} bytes for tensor {name!r} of {tensor.nbytes} bytes")
    content = tensor.detach().reshape(-1).view(torch.uint8)
    for piece in torch.split(content, PIECE_BYTES):
        with engine.pin(piece):
            _write_all(file, (ctypes.c_ubyte * piece.nbytes).from_address(piece.data_ptr()), offset)
        offset += piece.nbytes


def _write_all(file: int, memory: "ctypes.Array[ctypes.c_ubyte]", offset: int) -> None:
    """Write all of `memory` at `offset`; a short write goes on with the rest."""
    rest = memoryview(memory).cast("B")
    while rest:
        written_bytes = os.pwrite(file, rest, offset)
        rest = rest[written_bytes:]
        offset += written_bytes


def _sync_directory(directory: Path) -> None:
    """Make a new name in `directory` outlive a power loss."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
