"""Parameters that ``fully_shard`` divides among ranks (FSDP2): each rank pages its shards.

Torch gathers whole parameters for a forward or backward of a module and frees them afterwards, and puts either the
shards or the gathered tensors into the module. The shards are what stays, so they, their gradients and their states are
paged; what is gathered is torch's, ordinary memory within the budget. No collective is changed.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from torch_offload import _C, _compat
from torch_offload._compat import paged_part
from torch_offload.config import Config
from torch_offload.errors import OffloadError
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.import_watcher import ImportWatcher
from torch_offload.hooks.patches import Patches
from torch_offload.runtime.gathered_modules import check_room

logger = logging.getLogger(__name__)

Shards = MutableMapping[nn.Module, dict[str, weakref.ref[Any]]]
"""Of each module the parameters that are sharded, by name there, as ``fully_shard`` keeps them. Keeps none alive."""
LabelOf = Callable[[torch.Tensor], str | None]


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class ShardedParameters:
    """What `fully_shard` did to the modules of a session.

    Threads: the one that trains.
    """

    def __init__(self, engine: _C.Engine, patches: Patches, *, config: Config, label_of: LabelOf) -> None:
        """Replace nothing before :meth:`install`.

        Args:
            engine: Pages the shards.
            patches: Takes the replacements that they need.
            config: Of the session.
            label_of: Names a parameter of a wrapped module.
        """
        self._engine = engine
        self._patches = patches
        self._config = config
        self._label_of = label_of
        self._watcher = ImportWatcher(_compat.SHARDING_MODULE, self._page_as_made)
        self._is_installed = False
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.why_not_paged: str | None = None
        """The reason why shards stay in memory in this session; None where they are paged."""
        if engine.torch_device != "cpu":
            self.why_not_paged = "are sharded by fully_shard, whose shards are paged on the CPU only"
        elif config.update == "backward":
            self.why_not_paged = 'are sharded by fully_shard, which update="backward" does not know'

    def install(self) -> None:
        """Page the shards of paged parameters as they are made, once torch's own part has been imported."""
        if self.why_not_paged is None:
            self._watcher.install()

    def remove(self) -> None:
        """Wait for torch's own part no more. Safe to call twice."""
        self._watcher.remove()

    def _page_as_made(self) -> None:
        try:
            self._patches.replace(replaced_functions.SHARDED_PARAMETER, self._after_sharding)
            self._patches.replace(replaced_functions.PADDED_PARAMETER, self._after_padding)
        except OffloadError as error:  # they are paged before the first forward then, or refused there
            logger.info("shards are not paged as they are made: %s", error)

    def _after_sharding(self, original: Any, parameter: Any, whole: torch.Tensor, *args: Any, **options: Any) -> None:
        is_paged = _C.is_managed(paged_part(whole))
        original(parameter, whole, *args, **options)
        if is_paged:
            self._page_shard(parameter, f"shard of {self._label_of(whole) or 'a parameter'}")

    def _after_padding(self, original: Any, parameter: Any) -> None:
        """A shard that got other memory, and is paged there, may be padded in memory that is other again."""
        owner, name = next(_compat.owners_of_sharded(parameter))
        shard = getattr(owner, name)
        is_paged, label = _C.is_managed(paged_part(shard)), self._label_of(shard)
        original(parameter)
        if is_paged:
            self._page_shard(parameter, label or "a shard")

    def _page_shard(self, parameter: Any, label: str) -> None:
        self._engine.manage(paged_part(parameter.sharded_param), kind="parameter", label=label, of_module=True)
        self._page_padded(parameter)

    def in_module(self, module: nn.Module) -> Shards:
        """Return what is sharded in a module, which may be inside one that is.

        Raises:
            OutOfTierMemory: If the budget cannot hold what is gathered of one of them.
            OffloadError: If torch keeps it in a way that is not known.
        """
        shards: Shards = weakref.WeakKeyDictionary()
        sharded = {path: part for path, part in module.named_modules() if is_sharded(part)}
        try:
            self._check_room(sharded, set(_outermost_sharded(module)))
            for part in sharded.values():
                for parameter in _compat.sharded_parameters(part):
                    self._leave_gathered(parameter)
                    for owner, name in _compat.owners_of_sharded(parameter):
                        shards.setdefault(owner, {})[name] = weakref.ref(parameter)
        except AttributeError as error:
            raise OffloadError(
                f"torch {torch.__version__} keeps what fully_shard divided in a way that torch_offload does not "
                f"know ({error}); install torch {_compat.supported_range()}, or train without fully_shard"
            ) from error
        if shards and not self._is_installed:
            self._patches.replace(replaced_functions.GATHERED_PARAMETERS, self._after_gathering)
            self._patches.replace(replaced_functions.RESHARDED_PARAMETERS, self._after_resharding)
            self._patches.replace(replaced_functions.REDUCED_GRADIENTS, self._after_backward)
            self._is_installed = True
        return shards

    def _check_room(self, sharded: dict[str, nn.Module], outermost: set[nn.Module]) -> None:
        """Check, once for each, that what is gathered of modules fits `ram`: with a device, it lies there."""
        if self._config.gpu is not None:
            return
        left = {
            id(parameter): parameter  # several modules may have it
            for part in sharded.values()
            for parameter in _compat.left_gathered(part, is_outermost=part in outermost)
        }
        for path, part in sharded.items():
            parameters = _compat.sharded_parameters(part)
            if parameters and part not in self._checked:
                check_room(self._config, path or type(part).__name__, parameters, left=list(left.values()))
                self._checked.add(part)

    def page_padded(self, shards: Shards) -> None:
        """Have what gatherings read of paged shards, the same memory with its padding, be paged like these."""
        for parameter in _parameters_in(shards):
            self._page_padded(parameter)

    def _page_padded(self, parameter: Any) -> None:
        padded = _compat.padded_shard(parameter)
        if _C.is_managed(paged_part(parameter.sharded_param)) and not _C.is_managed(padded):
            self._engine.manage(padded, kind="parameter", label="shard", of_module=True)

    def release_padded(self, shards: Shards) -> None:
        """Make it ordinary again, after the shards."""
        for parameter in _parameters_in(shards):
            self._engine.unmanage(_compat.padded_shard(parameter))

    def _after_gathering(self, original: Any, parameter: Any, *args: Any, **options: Any) -> None:
        original(parameter, *args, **options)
        self._leave_gathered(parameter)

    def _after_resharding(self, original: Any, parameter: Any) -> None:
        """Page what stays for the backward, larger parts than shards, of fewer ranks, as if the graph kept it."""
        original(parameter)
        self._engine.save_for_backward(_compat.resharded_part(parameter))
        self._engine.end_saving()  # no operator is using it

    def _after_backward(self, original: Any, group: Any, *args: Any, **options: Any) -> None:
        """Free the gradients of replicas once they are summed; those of a GPU may still be read on another stream. Page
        gradients that wait for a later backward: whole ones under `set_requires_gradient_sync(False)`, those of shards
        under `set_requires_all_reduce(False)`.
        """
        original(group, *args, **options)
        if group.device.type != "cpu":
            return
        _compat.forget_reduced(group)
        for parameter, gradient in _compat.held_gradients(group):
            self._engine.gradient_complete(paged_part(parameter.sharded_param), paged_part(gradient))

    def _leave_gathered(self, parameter: Any) -> None:
        """Let no graph make pages of memory that torch frees and takes again by itself."""
        for gathered in parameter.all_gather_outputs:
            self._engine.keep_out(gathered)


def _outermost_sharded(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the sharded modules that are in no other one, of all in a module."""
    if is_sharded(module):
        yield module
    else:
        for child in module.children():
            yield from _outermost_sharded(child)


def _parameters_in(shards: Shards) -> list[Any]:
    found = (reference() for named in shards.values() for reference in named.values())
    return [parameter for parameter in found if parameter is not None]


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the gradient of a DTensor, in memory of its own.

    A reduction puts the gradients of a whole module into one tensor, which would stay as long as the smallest of them.
    """
    if parameter.grad is None:
        return None
    gradient = paged_part(parameter.grad)
    if gradient.layout is torch.strided and gradient.untyped_storage().nbytes() != gradient.nbytes:
        gradient = gradient.clone()
        _compat.set_local_part(parameter.grad, gradient)
    return gradient
