"""Builds and loads models that do not fit in memory: their tensors become pages one by one as they are registered."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from torch import nn

from torch_offload.config import Config, Directories, Settings
from torch_offload.runtime import node_budget, preflight, rank_failures
from torch_offload.runtime.api import wrap
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.session import Session
from torch_offload.runtime.settings import check_arguments, requested
from torch_offload.system import environment

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Loading:
    """The handle of a :func:`loading` block: its settings, and wrapping what was loaded."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def config(self) -> Config:
        """The settings of the engine, every one decided."""
        return self._session.config

    def wrap(self, module: AnyModule) -> AnyModule:
        """Wrap a module with the settings of the block; see :func:`torch_offload.wrap`."""
        return wrap(module)


@contextmanager
def loading(
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    **unknown: NoReturn,
) -> Iterator[Loading]:
    """Page every parameter and buffer that any module gets inside the block, as soon as it is registered.

    A model that is built or loaded inside, such as by ``from_pretrained``, is never in memory as a whole. Pass it to
    :func:`torch_offload.wrap` or to ``wrap`` of the handle, which join the same engine and budget. Blocks may be
    nested, and opened while modules are wrapped.

    Args:
        gpu: As in :func:`torch_offload.wrap`.
        ram: As in :func:`torch_offload.wrap`.
        ssd: As in :func:`torch_offload.wrap`.
        config: As in :func:`torch_offload.wrap`.
        **unknown: None; another name is refused with the setting that it may mean.

    Yields:
        A handle with the decided settings.

    Raises:
        ConfigError: If a setting cannot be used, or differs from the engine that is running.
        OutOfTierMemory: Inside the block, if the budget is too small for the largest tensor, or a disk is full.
            Models that are laid out first, as by ``from_pretrained``, are refused before anything is read.
        TierIOError: If the scratch file cannot be made, or inside the block, written.
    """
    check_arguments("loading", unknown)
    rank_failures.install()
    session = session_without_module(requested(config, gpu=gpu, ram=ram, ssd=ssd))
    session.pending.open()
    try:
        with environment.variables(environment.LOADING_IN_SEQUENCE):
            yield Loading(session)
    finally:
        session.pending.close()
        PROCESS.close_if_unused()


def session_without_module(request: Config) -> Session:
    """Return the session that is open, or a new one, before there is a module to wrap.

    Args:
        request: Settings as they were asked for.

    Raises:
        ConfigError: If a setting cannot be used, or differs from the engine that is running.
        TierIOError: If the scratch file cannot be made.
    """
    if PROCESS.joinable(request) is not None:
        return PROCESS.open_session(request)
    decided = preflight.resolve(request)
    return PROCESS.open_session(decided, node=node_budget.of_usual_budget(request, decided))


def from_pretrained(
    auto_class: Any,
    name: str,
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    **options: Any,
) -> Any:
    """Load a model under the budget and wrap it: it is never in memory as a whole.

        model = torch_offload.from_pretrained(AutoModelForCausalLM, "path/to/model", ram="8GiB", dtype="float32")

    Args:
        auto_class: A class of transformers with ``from_pretrained``, such as ``AutoModelForCausalLM``.
        name: Of the model: a folder, or the name of one on the hub.
        gpu: As in :func:`torch_offload.wrap`.
        ram: As in :func:`torch_offload.wrap`.
        ssd: As in :func:`torch_offload.wrap`.
        config: As in :func:`torch_offload.wrap`. For a configuration of the *model* load it yourself inside of
            :func:`torch_offload.loading`.
        **options: For ``auto_class.from_pretrained``, such as ``dtype``.

    Returns:
        The wrapped model.

    Raises:
        OffloadError: As from :func:`torch_offload.loading` and :func:`torch_offload.wrap`.
    """
    with loading(gpu=gpu, ram=ram, ssd=ssd, config=config) as block:
        return block.wrap(auto_class.from_pretrained(name, **options))
