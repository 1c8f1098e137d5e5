"""Automatic paging for scripts started by `torch-offload run`, and for their child processes.

Nothing happens until the first large parameter of a module arrives; then the engine opens. From then on everything is
paged as it is registered, and a module that is called with such tensors in it is wrapped, the outermost first.
"""

import atexit
import logging
import os
import socket
import sys
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_offload.config import Config, format_size
from torch_offload.hooks.import_watcher import ImportWatcher
from torch_offload.hooks.registrations import Listener
from torch_offload.integrations.trainer_optimizer import TrainerOptimizer
from torch_offload.launch.fit import Fit
from torch_offload.runtime import node_budget, preflight, rank_failures
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.session import Session
from torch_offload.runtime.tensor_parts import is_not_quantized_yet, is_ordinary, parts_of
from torch_offload.system import environment
from torch_offload.system.environment import Launch
from torch_offload.system.terminal import echo

logger = logging.getLogger(__name__)

MAX_PROCESSES = 64


class Autopage:
    """Watcher of registrations and calls. There is one per process, for as long as the process lives.

    Threads: those that build and call modules, one at a time.
    """

    def __init__(self, launch: Launch) -> None:
        """Watch registrations from now on.

        Args:
            launch: With settings as the user gave them: what was left open is decided when the engine opens.
        """
        self._launch = launch
        self._process = os.getpid()
        self._session: Session | None = None
        self._budget_note: socket.socket | None = None
        self._call_hook: RemovableHandle | None = None
        self._passed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._listening = PROCESS.registrations.listen(Listener(self._on_tensor))
        self._optimizer = None if launch.optimizer is None else TrainerOptimizer(launch.optimizer)
        if self._optimizer is not None:
            ImportWatcher("transformers.trainer", self._optimizer.install).install()
            atexit.register(self._warn_if_unused, self._optimizer)
        self._fit = Fit(launch.config, optimizer=launch.optimizer) if launch.fit else None
        if self._fit is not None:
            ImportWatcher("transformers.trainer", self._fit.install).install()
            atexit.register(self._say_if_not_fitted, self._fit)

    def _warn_if_unused(self, optimizer: TrainerOptimizer) -> None:
        """Warn, when this process ends, if it paged a model and no Trainer chose an optimizer by its arguments."""
        if self._session is not None and not optimizer.is_used and os.getpid() == self._process:
            logger.warning(
                "--optimizer %s had no effect: the script made its optimizer itself, in a loop of its own or by a "
                "Trainer's optimizers or optimizer_cls_and_kwargs; create torch_offload.AdamW there",
                optimizer.name,
            )

    def _say_if_not_fitted(self, fit: Fit) -> None:
        """Say so, when this process ends, if it paged a model and made no Trainer."""
        if self._session is not None and not fit.is_used and os.getpid() == self._process:
            echo(
                "torch-offload: --fit had no effect: the script makes no Trainer, so it ran as it is; torch-offload "
                "plan MODEL --search --tokens-per-step COUNT says what rows and accumulation its loop should have",
                err=True,
            )

    def _on_tensor(self, module: nn.Module, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Open the engine for the first tensor that it would page; once open, it takes them by itself."""
        if os.getpid() != self._process or not _is_large(tensor, self._launch.config):
            return
        if self._session is None or PROCESS.session is not self._session:
            # On a GPU the engine is there before it is decided where a model goes that is only laid out so far.
            if tensor.device.type == "meta" and not self._launch.config.uses_cuda:
                _check_layout(self._launch.config, module, name, tensor)
                return
            self._session = self._open()
            self._session.on_tensor(module, name, tensor, kind)
        if self._call_hook is None and tensor.device.type != "meta":
            self._call_hook = register_module_forward_pre_hook(self._before_call)

    def _open(self) -> Session:
        config = self._launch.config
        sharing = environment.process_count()
        if sharing > 1 and config.ram is not None:
            logger.info("%d processes share %s", sharing, format_size(config.ram))
            config = config.replace(ram=config.ram // sharing)
        self._budget_note = self._budget_note or note_budget_use(self._launch.name, sharing=sharing)
        running = PROCESS.session
        if running is None or PROCESS.joinable(running.config) is None:
            decided = preflight.resolve(config)
            node = node_budget.of_machine(decided, launch=self._launch.name)
            running = PROCESS.open_session(decided, node=node)
        running.pending.open()
        _add_figures_to_trackers(running)
        return running

    def _before_call(self, module: nn.Module, args: Any) -> None:
        """Wrap a module that is called with tensors in it that arrived. Gone while no such module waits."""
        if torch.compiler.is_compiling():
            return
        session = self._session
        if session is None or session is not PROCESS.session or not session.pending.has_waiting():
            if self._call_hook is not None:
                self._call_hook.remove()
                self._call_hook = None
            return
        if module in self._passed or session.is_part(module):
            return
        if any(session.pending.is_waiting(part) for part in module.modules()):
            session.add(module, is_called=True)
        else:
            self._passed.add(module)


def begin(launch: Launch) -> None:
    """Page from now on, in this process. A second call changes nothing."""
    if PROCESS.autopage is None:
        rank_failures.install()
        PROCESS.autopage = Autopage(launch)


def begin_in_child() -> None:
    """Page in this process if a launcher started it."""
    launch = environment.launch_of_parent()
    if launch is not None:
        begin(launch)


def note_budget_use(name: str, *, sharing: int) -> socket.socket | None:
    """Note that this process takes the budget of the launch `name`, until it ends.

    Warns where more than `sharing` processes have: each keeps to the budget, together they do not.

    Returns:
        The note: an unconnected socket, whose name the system keeps exactly as long as the process.
    """
    for number in range(MAX_PROCESSES):
        note = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            note.bind(f"\0torch-offload-{name}-{number}")
        except OSError:
            note.close()
            continue
        if number >= sharing:
            warnings.warn(
                f"{number} other process(es) of this run use the same --ram budget in full; lower --ram so that all of "
                "them fit in memory",
                RuntimeWarning,
                stacklevel=2,
            )
        return note
    return None


def _add_figures_to_trackers(session: Session) -> None:
    """Give a script's Trainer a ReportCallback until the session closes, if the script imported a Trainer by now."""
    if "transformers.trainer" in sys.modules:
        from torch_offload.integrations import trainer

        trainer.install()
        session.on_close(trainer.uninstall)


def _is_large(tensor: torch.Tensor, config: Config) -> bool:
    places = ("cpu", "meta", "cuda") if config.uses_cuda else ("cpu", "meta")
    return any(
        is_ordinary(part) and part.device.type in places and part.nbytes >= max(config.min_paged_bytes, 1)
        for _, part in parts_of(tensor)
    )


def _check_layout(config: Config, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Refuse a model that is only laid out so far, if its budget is known and too small."""
    keeps_its_size = is_ordinary(tensor) and not is_not_quantized_yet(tensor)
    if config.ram is not None and keeps_its_size and not PROCESS.provisional_layers.include(tensor):
        preflight.check_laid_out(config, module, name, tensor)
