"""Registers the quantizer of coded experts with transformers, so that ``from_pretrained`` opens their folders.

What the quantizer needs is imported with the first such folder.
"""

from typing import Any

from torch_offload.errors import CheckpointError
from torch_offload.hooks.import_watcher import ImportWatcher
from torch_offload.moe.folder_format import PRE_RELEASE_METHOD, QUANT_METHOD

_MODELS = "transformers.modeling_utils"  # has `from_pretrained`


def open_coded_folders() -> None:
    """Register the quantizer, now or when transformers is imported."""
    ImportWatcher(_MODELS, _register).install()


class _LazyConfig:
    """Stands for ``CodedExpertsConfig`` until transformers reads the first configuration."""

    @staticmethod
    def from_dict(entry: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Read the ``quantization_config`` of a config.json."""
        from torch_offload.moe import activate  # noqa: F401  adapters may be put on the model
        from torch_offload.moe.checkpoint import CodedExpertsConfig

        return CodedExpertsConfig.from_dict(entry, *args, **options)  # type: ignore[no-untyped-call]


class _PreReleaseConfig:
    """Refuses folders whose tensors have the names of before the first release."""

    @staticmethod
    def from_dict(entry: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Raise CheckpointError: such a folder has to be written again."""
        raise CheckpointError(
            f"quant_method {PRE_RELEASE_METHOD!r}: these coded experts were written by a pre-release, expected "
            f"{QUANT_METHOD!r}; compress the model again"
        )


def _register() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, _LazyConfig)
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(PRE_RELEASE_METHOD, _PreReleaseConfig)
