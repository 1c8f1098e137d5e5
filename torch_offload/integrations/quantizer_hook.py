"""Has transformers open folders of coded experts in any script: what that needs is imported when it meets one."""

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

METHOD = "torch_offload"
"""``quant_method`` of these folders."""

_MODELS = "transformers.modeling_utils"
"""What has ``from_pretrained``."""


def open_coded_folders() -> None:
    """Register them with transformers, now or when it is imported."""
    if _MODELS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Watcher(_MODELS, _register))


class _CodedFolder:
    """What transformers has read the configuration of such a folder."""

    @staticmethod
    def from_dict(said: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Have the one that knows what config.json says read it."""
        from torch_offload.moe import activate  # noqa: F401  with adapters, which want to be put on such models
        from torch_offload.moe.checkpoint import CodedExpertsConfig

        return CodedExpertsConfig.from_dict(said, *args, **options)  # type: ignore[no-untyped-call]


def _register() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, _CodedFolder)


class _Watcher:
    """Finds nothing; has something done right after a module was imported."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as it would have been found, with a loader that does it."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        load = loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            load(module)  # what fails is tried again, and found again
            if self in sys.meta_path:  # another finder may have asked for the module while it was being found
                sys.meta_path.remove(self)
                self._act()

        loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
