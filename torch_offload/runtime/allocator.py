"""Torch's CPU allocator under a budget, for programs that have no module to wrap."""

import threading
from types import TracebackType
from typing import NoReturn

from torch_offload.config import Config, Directories, Settings
from torch_offload.errors import OffloadError
from torch_offload.runtime.loading import session_without_module
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.session import Session
from torch_offload.runtime.settings import check_arguments, requested


class RegisteredAllocator:
    """What :func:`register_allocator` returns: a context manager that ends with its block, or by :meth:`close`.

    Threads: the one that registered closes.
    """

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session
        self._config = session.config
        self._activations = session.activations
        self._thread = threading.get_ident()
        session.allocator_users += 1
        if self._activations is not None:
            self._activations.enter()

    @property
    def config(self) -> Config:
        """The settings of the engine, every one decided."""
        return self._config

    def close(self) -> None:
        """End it. Tensors that were made meanwhile stay usable. Safe to call twice.

        Raises:
            OffloadError: In another thread than the one that registered, whose hooks on saved tensors have to go.
        """
        session = self._session
        if session is None:
            return
        if threading.get_ident() != self._thread:
            raise OffloadError("register_allocator: close it in the thread that registered it")
        self._session = None
        if self._activations is not None:
            self._activations.leave()
        session.allocator_users -= 1
        PROCESS.close_if_unused()

    def __enter__(self) -> "RegisteredAllocator":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()


def register_allocator(
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    **unknown: NoReturn,
) -> RegisteredAllocator:
    """Keep what torch allocates within a budget, and page what autograd saves, without a module to wrap.

        with torch_offload.register_allocator(ram="8GiB", ssd="/mnt/nvme"):
            loss = function(tensors)  # any code
            loss.backward()

    From the call on, until the block ends or ``close`` is called:

    - On the CPU, allocations of 64 KiB and more are parts of ``ram``, and smaller ones are counted there. Where it is
      full, pages leave. What the program itself holds is no page and stays.
    - What autograd saves in this thread becomes pages, as ``activations`` says, on a GPU too. Where the program has
      hooks on saved tensors of its own, those stay.
    - On a GPU, torch's own allocator stays, with ``gpu_reserved`` as its limit.

    Modules can be wrapped meanwhile, and join the same engine and budget. Blocks may be nested.

    Experimental: may change in a minor release.

    Args:
        gpu: As in :func:`torch_offload.wrap`.
        ram: As in :func:`torch_offload.wrap`.
        ssd: As in :func:`torch_offload.wrap`.
        config: As in :func:`torch_offload.wrap`.
        **unknown: None; another name is refused with the setting that it may mean.

    Raises:
        ConfigError: If a setting cannot be used, or differs from the engine that is running.
        TierIOError: If the scratch file cannot be made.
        OutOfTierMemory: Later, from an operator whose result the budget has no room for.
    """
    check_arguments("register_allocator", unknown)
    return RegisteredAllocator(session_without_module(requested(config, gpu=gpu, ram=ram, ssd=ssd)))
