"""Access to memory behind the dispatcher: held in memory for as long as the accessor may look at it.

Most such access is safe by itself: an address that has no page faults, and the engine brings the page. Two kinds are
not. A result that outlives its call (a numpy array, a DLPack capsule) would fault at each look after an eviction, and
would not see an update that is deferred. A system call that reads from an absent address fails with EFAULT. Both are
given pinned memory here; sharing with another process is refused.

The replacements are installed while there is an engine and ask one question of tensors that are not managed.
"""

import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.dlpack
from torch.utils._mode_utils import no_dispatch

from torch_offload import _C
from torch_offload.errors import OffloadError, OutOfTierMemory
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.runtime import safetensors_writer


def install(patches: Patches, *, budget_bytes: int, check: Callable[[], None]) -> None:
    """Replace the functions of torch and safetensors that read memory behind the dispatcher.

    Threads: one at a time; the session calls it when it opens and undoes `patches` when it closes.

    Args:
        patches: To replace with.
        budget_bytes: Of the engine.
        check: Raises if tensors must not be written to files now.
    """
    patches.replace(replaced_functions.TENSOR_NUMPY, _held_numpy)
    for function in (replaced_functions.TENSOR_DLPACK, *replaced_functions.TO_DLPACK):
        patches.replace(function, _held_dlpack)
    for function in replaced_functions.STORAGE_SHARING:
        patches.replace(function, _refuse_sharing)
    patches.replace(replaced_functions.STORAGE_WRITE_FILE, functools.partial(_pinned_write_file, check))
    patches.replace(replaced_functions.STORAGE_ADDRESS, _address)
    patches.replace(replaced_functions.STORAGE_COPY, _pinned_copy)
    patches.replace(replaced_functions.FILE_WRITER_RECORD, functools.partial(_pinned_write_record, check))
    safetensors_writer.install(patches, budget_bytes=budget_bytes, check=check)


def held(tensor: torch.Tensor, engine: _C.Engine) -> torch.Tensor:
    """Return a plain tensor over the same memory, which stays where it is while anything uses that storage.

    The pin belongs to the storage of the result, so it also outlives the result where a view, an array or a capsule
    made from it lives on. Work that is pending on the tensor has been applied.

    Raises:
        OutOfTierMemory: If the tensor does not fit beside what is pinned already.
        TierIOError: If its pages cannot be read.
    """
    storage = tensor.untyped_storage()
    buffer = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    holder: Any = buffer  # an instance of a ctypes array takes attributes; torch keeps it alive
    holder.pin = engine.pin(tensor)
    holder.storage = storage
    with no_dispatch():
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def engine_of_storage(storage: torch.UntypedStorage) -> tuple[_C.Engine, torch.Tensor] | None:
    """Return the engine that pages a storage and a tensor of its bytes; None if it is ordinary memory."""
    if storage.device.type not in ("cpu", "cuda") or storage.nbytes() == 0:
        return None
    return _C.engine_of_storage(storage)


def pinned_storage(storage: torch.UntypedStorage, *, read_only: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which the storage may be used by its address; nothing happens for ordinary memory."""
    paged = engine_of_storage(storage)
    if paged is None:
        return nullcontext()
    engine, content = paged
    return engine.pin(content, read_only=read_only)


def _held_numpy(original: Callable[..., Any], tensor: torch.Tensor, *, force: bool = False) -> Any:
    engine = _C.engine_of(tensor)
    if engine is None or tensor.device.type != "cpu":  # elsewhere torch refuses, or copies by operators
        return original(tensor, force=force)
    if force:
        plain = tensor.detach().resolve_conj().resolve_neg()
        engine = _C.engine_of(plain)  # none where resolving made a copy
        return original(plain if engine is None else held(plain, engine))
    if (tensor.requires_grad and torch.is_grad_enabled()) or tensor.is_conj() or tensor.is_neg():
        return original(tensor)  # refused by torch, in its own words
    return original(held(tensor, engine))


def _held_dlpack(original: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
    engine = _C.engine_of(tensor) if isinstance(tensor, torch.Tensor) else None
    if engine is None or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return original(tensor, *args, **options)
    if tensor.device.type != "cpu":
        leased = tensor.detach()
        engine.lease(leased)
        return original(leased, *args, **options)
    return original(held(tensor, engine), *args, **options)


def _refuse_sharing(original: Callable[..., Any], storage: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
    if engine_of_storage(storage) is not None:
        raise OffloadError(
            f"{storage.nbytes()} bytes that torch_offload pages cannot be shared with other processes; "
            "share a clone(), or call torch_offload.unwrap(module) first"
        )
    return original(storage, *args, **options)


def _address(original: Callable[..., Any], storage: torch.UntypedStorage) -> int:
    """On a GPU torch refuses the addresses of paged memory. To tell storages apart, one that never changes will do."""
    if storage.device.type != "cuda":
        return int(original(storage))
    paged = engine_of_storage(storage)
    return int(original(storage)) if paged is None else _C.address_of(paged[1])


def _pinned_copy(
    original: Callable[..., Any], target: torch.UntypedStorage, source: Any, *args: Any, **options: Any
) -> Any:
    """Copy as `torch.distributed.checkpoint.async_save` does. What does not fit at once faults, but on a GPU."""
    try:
        with pinned_storage(target, read_only=False), pinned_storage(source):
            return original(target, source, *args, **options)
    except OutOfTierMemory:
        if "cuda" in (target.device.type, source.device.type):
            raise
    return original(target, source, *args, **options)


def _pinned_write_file(
    check: Callable[[], None], original: Callable[..., Any], storage: torch.UntypedStorage, *args: Any
) -> Any:
    if engine_of_storage(storage) is not None:
        check()
    with pinned_storage(storage):
        return original(storage, *args)


def _pinned_write_record(
    check: Callable[[], None],
    original: Callable[..., Any],
    writer: Any,
    name: str,
    content: Any,
    size_bytes: int,
) -> Any:
    if not isinstance(content, torch.UntypedStorage):
        return original(writer, name, content, size_bytes)
    if engine_of_storage(content) is not None:
        check()
    with pinned_storage(content):
        return original(writer, name, content, size_bytes)
