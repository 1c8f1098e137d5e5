"""The optimizer that a ``Trainer`` creates in a launched script: ``torch-offload run --optimizer adamw``.

Without the launcher, give the ``Trainer`` the class itself: ``optimizer_cls_and_kwargs=(torch_offload.AdamW, {...})``.
"""

import functools
from types import MappingProxyType
from typing import Any, cast

import torch

from torch_offload.errors import ConfigError
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.optim.adamw import AdamW

OPTIMIZERS = MappingProxyType({"adamw": {}, "adamw-8bit": {"moments": "8bit"}})
"""Names on the command line, and the arguments of :class:`torch_offload.AdamW` that they mean."""

_NOT_TAKEN = ("fused", "foreach", "capturable", "differentiable")


class TrainerOptimizer:
    """Has every ``Trainer`` create :class:`torch_offload.AdamW` where it would create ``torch.optim.AdamW``.

    Attributes:
        name: One of :data:`OPTIMIZERS`.
        is_used: Whether a ``Trainer`` asked for its optimizer.
    """

    def __init__(self, name: str) -> None:
        """Replace nothing before :meth:`install`."""
        self.name = name
        self.is_used = False
        self._patches = Patches()

    def install(self) -> None:
        """Replace the function that a ``Trainer`` asks. Pre: ``transformers.trainer`` is imported."""
        self._patches.replace(replaced_functions.TRAINER_OPTIMIZER, functools.partial(_class_and_arguments, self))

    def uninstall(self) -> None:
        """Put the function back."""
        self._patches.undo()


def _class_and_arguments(chosen: TrainerOptimizer, original: Any, *args: Any, **options: Any) -> Any:
    """Return class and arguments of the optimizer, as ``Trainer.get_optimizer_cls_and_kwargs`` does.

    Raises:
        ConfigError: If the script asks for another optimizer than AdamW.
    """
    requested, arguments = cast("tuple[type, dict[str, Any]]", original(*args, **options))
    if requested is not torch.optim.AdamW:
        name = getattr(requested, "__name__", requested)
        raise ConfigError(
            f"--optimizer {chosen.name} takes the place of torch.optim.AdamW, but the script asks for {name}; leave "
            "--optimizer out, or have the script train with --optim adamw_torch"
        )
    chosen.is_used = True
    kept = {option: value for option, value in arguments.items() if option not in _NOT_TAKEN}
    return AdamW, kept | OPTIMIZERS[chosen.name]
