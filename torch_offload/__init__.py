"""Train PyTorch models several times larger than memory, unmodified and with the same numbers.

    model = torch_offload.wrap(model, ram="8GiB", ssd="/mnt/nvme")

Everything else stays as it was: the training loop or ``Trainer``, the optimizer, saving and loading.
"""

import pkgutil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_offload import _compat

_compat.check_torch()
_compat.settle_vector_math()

from torch_offload.config import Config, Emulation  # noqa: E402
from torch_offload.diagnostics.probe import Probe, probe  # noqa: E402
from torch_offload.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    OffloadError,
    OutOfTierMemory,
    PageCorruptError,
    TierIOError,
    UnsupportedModelError,
)
from torch_offload.integrations.quantizer_hook import open_coded_folders  # noqa: E402
from torch_offload.optim.adamw import AdamW  # noqa: E402  after the check, which names the remedy
from torch_offload.planning.api import plan  # noqa: E402
from torch_offload.planning.pipeline_plan import PipelinePlan  # noqa: E402
from torch_offload.planning.plan import Plan  # noqa: E402
from torch_offload.planning.search import search  # noqa: E402
from torch_offload.planning.search_result import Search  # noqa: E402
from torch_offload.reporting.report import Report  # noqa: E402
from torch_offload.runtime.allocator import register_allocator  # noqa: E402
from torch_offload.runtime.api import evict, flush, is_resident, pinned, prefetch, report, unwrap, wrap  # noqa: E402
from torch_offload.runtime.loading import from_pretrained, loading  # noqa: E402

open_coded_folders()

if TYPE_CHECKING:
    from torch_offload import moe as moe
    from torch_offload.compression.compress import compress as compress
    from torch_offload.integrations.arguments import OffloadArguments as OffloadArguments
    from torch_offload.integrations.trainer import ReportCallback as ReportCallback

__version__ = _compat.package_version()

__all__ = [
    "AdamW",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Emulation",
    "OffloadArguments",
    "OffloadError",
    "OutOfTierMemory",
    "PageCorruptError",
    "PipelinePlan",
    "Plan",
    "Probe",
    "Report",
    "ReportCallback",
    "Search",
    "TierIOError",
    "UnsupportedModelError",
    "__version__",
    "compress",
    "evict",
    "flush",
    "from_pretrained",
    "is_resident",
    "loading",
    "moe",
    "pinned",
    "plan",
    "prefetch",
    "probe",
    "register_allocator",
    "report",
    "search",
    "unwrap",
    "wrap",
]

_LAZY = MappingProxyType(
    {
        "OffloadArguments": "torch_offload.integrations.arguments:OffloadArguments",
        "ReportCallback": "torch_offload.integrations.trainer:ReportCallback",
        "compress": "torch_offload.compression.compress:compress",
        "moe": "torch_offload.moe",
    }
)
"""Names whose modules need transformers, or most programs do without."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a lazy name when it is asked for."""
        if name in _LAZY:
            return pkgutil.resolve_name(_LAZY[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
