"""The verbs of the public surface."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn, TypeVar

import torch
from torch import nn

from torch_offload import _C
from torch_offload._compat import paged_part
from torch_offload.config import Directories, Settings, format_size
from torch_offload.errors import OffloadError, OutOfTierMemory
from torch_offload.reporting.report import Report
from torch_offload.runtime import node_budget, preflight, rank_failures
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.settings import check_arguments, requested
from torch_offload.system import resources

logger = logging.getLogger(__name__)

AnyModule = TypeVar("AnyModule", bound=nn.Module)
"""``wrap`` returns the type it is given."""


def wrap(
    module: AnyModule,
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    **unknown: NoReturn,
) -> AnyModule:
    """Page the module's parameters, buffers, gradients and optimizer states between GPU, memory and SSD.

    The module is changed in place and returned; its class, names and ``state_dict`` stay the same, and so do all
    numbers. Modules wrapped while another one is share its engine and its budget. Weights of bitsandbytes and torchao
    are paged with what they are made of, and of a DTensor this rank's part. What cannot be paged (meta, sparse, shared
    or non-CPU tensors, subclasses that are not known) stays as it is; one warning names it.

    Args:
        module: Any module; parameters that are added or made trainable later are paged as well.
        gpu: Hard limit of GPU memory to compute in, in bytes or as ``"24GiB"``. Default: the module computes in
            ``ram``.
        ram: Hard limit of memory. Default: 80 % of what is free now, which the processes of a launch on this machine
            share: each can have an even part of it, and what the others do not need.
        ssd: Directory on a real disk for an unnamed scratch file, or several to spread pages over. Default: a usual
            directory for temporary files.
        config: All settings, as a :class:`Config` or a dict; the other arguments take precedence over it. ``"auto"``
            leaves to measurements what it can: ``activations="auto"``, with the reasons in the report. Default: those
            of the environment variable ``TORCH_OFFLOAD_CONFIG``.
        **unknown: None; another name is refused with the setting that it may mean.

    Raises:
        ConfigError: If a setting cannot be used, or differs from the engine that is running.
        OutOfTierMemory: If the budget cannot hold what one operator needs, or the disk what memory cannot.
        TierIOError: If the scratch file cannot be made.
        OffloadError: If the module is wrapped already. After any error the module is as it was.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"wrap needs a torch.nn.Module, got {type(module).__name__}")
    check_arguments("wrap", unknown)
    rank_failures.install()
    request = requested(config, gpu=gpu, ram=ram, ssd=ssd)
    session = PROCESS.joinable(request)
    if session is not None and session.is_wrapped(module):
        raise OffloadError(
            f"this {type(module).__name__} is wrapped already; call torch_offload.unwrap(module) before wrapping again"
        )
    paged = preflight.paged_tensors(module, preflight.check_gpu(request) if session is None else session.config)
    settings = preflight.resolve(request, paged.values()) if session is None else session.config
    preflight.check_all(settings, module, paged)
    if session is None:
        needed_bytes = preflight.needed_bytes(settings, module, paged)
        node = node_budget.of_usual_budget(request, settings, needed_bytes=needed_bytes)
        session = PROCESS.open_session(settings, node=node)
    try:
        session.add(module)
    except BaseException:
        PROCESS.close_if_unused()
        raise
    return module


def unwrap(module: AnyModule) -> AnyModule:
    """Make the module's parameters, buffers, gradients and optimizer states ordinary tensors again.

    Deferred work is applied first. Everything has to fit in memory, outside of the budget.

    Raises:
        OutOfTierMemory: If it does not fit; nothing was changed.
        TierIOError: If bytes cannot be read back. What could be was, and the log names the rest; the module stays
            wrapped.
        OffloadError: If the module is not wrapped.
    """
    session = PROCESS.session
    if session is None or not session.is_wrapped(module):
        raise OffloadError(f"this {type(module).__name__} is not wrapped; unwrap the very module given to wrap")
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in session.tensors_of(module)}
    needed_bytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    free_bytes = resources.free_memory_bytes()
    if needed_bytes > free_bytes + (session.config.ram or 0):
        raise OutOfTierMemory(
            f"host tier: unwrapping needs {needed_bytes} bytes ({format_size(needed_bytes)}) of ordinary memory, "
            f"{free_bytes} bytes are free; save the module instead, or unwrap it on a larger machine"
        )
    session.remove(module)
    PROCESS.close_if_unused()
    return module


def evict(target: nn.Module | torch.Tensor) -> int:
    """Send a tensor, or all that is paged of a module, to SSD and wait for it.

    Returns:
        Bytes that stayed in memory: pinned, or not paged (below ``min_paged_bytes``, or never wrapped).

    Raises:
        TierIOError: If pages cannot be written.
    """
    stayed_bytes = 0
    for tensor in _targets(target):
        engine = _C.engine_of(tensor)
        stayed_bytes += tensor.nbytes if engine is None else engine.evict(tensor)
    return stayed_bytes


def prefetch(target: nn.Module | torch.Tensor) -> None:
    """Begin to read a tensor, or all that is paged of a module, ahead of use. A hint: it returns at once."""
    for tensor in _targets(target):
        engine = _C.engine_of(tensor)
        if engine is not None:
            engine.prefetch(tensor)


@contextmanager
def pinned(*targets: nn.Module | torch.Tensor, read_only: bool = False) -> Iterator[None]:
    """Keep tensors, or all that is paged of modules, where they compute while the context is open.

    For kernels that are given bare addresses, such as Triton's: on a GPU nothing fetches what is not there, and asking
    a paged tensor for its address outside of this context raises an error. Everything has to fit the budget at once.

    Args:
        targets: Tensors and modules; what is not paged is left alone.
        read_only: That nothing writes by a bare address. On a GPU such writes are not noticed, so unless this is said
            everything counts as written and is written back once; a write in spite of it is lost.

    Raises:
        OutOfTierMemory: If it does not.
        TierIOError: If pages cannot be read.
    """
    with ExitStack() as pins:
        for tensor in {id(tensor): tensor for target in targets for tensor in _targets(target)}.values():
            engine = _C.engine_of(tensor)
            if engine is not None:
                pins.enter_context(engine.pin(tensor, read_only=read_only))
        yield


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether all bytes of a tensor are in memory. Always true for one that is not paged. Fetches nothing."""
    part = paged_part(tensor)
    engine = _C.engine_of(part)
    return engine is None or engine.is_resident(part)


def flush() -> None:
    """Apply all deferred work and wait for all writes. Nothing to do where nothing is wrapped.

    Raises:
        TierIOError: If a write failed, also an earlier one.
    """
    session = PROCESS.session
    if session is not None:
        session.engine.flush()


def report() -> Report:
    """Return what the engine did since it started: bytes, traffic, stalls. After the last ``unwrap``: its final report.

    Raises:
        OffloadError: If nothing was ever wrapped.
    """
    figures = PROCESS.report()
    if figures is None:
        raise OffloadError("nothing to report: no module was wrapped; call torch_offload.wrap(module) first")
    return figures


def _targets(target: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(target, torch.Tensor):
        return [paged_part(target)]
    if not isinstance(target, nn.Module):
        raise TypeError(f"expected a torch.nn.Module or a torch.Tensor, got {type(target).__name__}")
    session = PROCESS.session
    found = [] if session is None else session.tensors_of(target)
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in found}.values())
