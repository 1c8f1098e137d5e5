"""Building and loading models that do not fit in memory: their tensors are paged one by one as they arrive."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch_offload.config import Config
from torch_offload.runtime import preflight
from torch_offload.runtime.process import PROCESS
from torch_offload.system import environment


@contextmanager
def loading(
    *,
    ram: int | str | None = None,
    ssd: str | os.PathLike[str] | None = None,
    device: int | str | None = None,
    config: Config | None = None,
) -> Iterator[None]:
    """Page every parameter and buffer that any module gets inside the block, as soon as it is registered.

    A model that is built or loaded inside, such as by ``from_pretrained``, is never in memory as a whole. Pass it to
    :func:`torch_offload.wrap` afterwards, which joins the same engine and budget. Blocks may be nested, and opened
    while modules are wrapped.

    Args:
        ram: Hard limit of memory, in bytes or as ``"24GiB"``. Default: 80 % of what is free now.
        ssd: Directory on a real disk for an unnamed scratch file. Default: a usual directory for temporary files.
        device: Hard limit of a device's memory, to compute in it. Default: the module computes in ``ram``.
        config: All settings; the other arguments take precedence over it.

    Raises:
        ConfigError: If a setting cannot be used, or differs from the engine that is running.
        OutOfTierMemory: Inside the block, if the budget is too small for the largest tensor, or a disk is full.
            Models that are laid out first, as by ``from_pretrained``, are refused before anything is read.
        TierIOError: If the scratch file cannot be made, or inside the block, written.
    """
    given = {name: value for name, value in (("ram", ram), ("ssd", ssd), ("device", device)) if value is not None}
    wanted = (config or Config()).replace(**given)
    if PROCESS.joinable(wanted) is None:
        wanted = preflight.decided(wanted)
    session = PROCESS.open_session(wanted)
    session.arrivals.open()
    try:
        with environment.variables(environment.LOADING_IN_SEQUENCE):
            yield
    finally:
        session.arrivals.close()
        PROCESS.close_if_unused()
