"""Has transformers open folders of coded experts in any script: what that needs is imported when it meets one."""

from typing import Any

from torch_offload.hooks.import_watcher import ImportWatcher

METHOD = "torch_offload"
"""``quant_method`` of these folders."""

_MODELS = "transformers.modeling_utils"
"""What has ``from_pretrained``."""


def open_coded_folders() -> None:
    """Register them with transformers, now or when it is imported."""
    ImportWatcher(_MODELS, _register).install()


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
