"""Train PyTorch models several times larger than memory, unmodified and with the same numbers.

    model = torch_offload.wrap(model, ram="8GiB", ssd="/mnt/nvme")

Everything else stays as it was: the training loop or ``Trainer``, the optimizer, saving and loading.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_offload import _compat

_compat.check_torch()

from torch_offload.config import Config  # noqa: E402
from torch_offload.diagnostics.probe import Probe, probe  # noqa: E402
from torch_offload.errors import (  # noqa: E402
    ConfigError,
    OffloadError,
    OutOfTierMemory,
    PageCorruptError,
    TierIOError,
)
from torch_offload.integrations.quantizer_hook import open_coded_folders  # noqa: E402
from torch_offload.optim.adamw import AdamW  # noqa: E402  after the check, which names the remedy
from torch_offload.planning.api import plan  # noqa: E402
from torch_offload.planning.plan import Plan  # noqa: E402
from torch_offload.reporting.report import Report  # noqa: E402
from torch_offload.runtime.api import evict, flush, is_resident, pinned, prefetch, report, unwrap, wrap  # noqa: E402
from torch_offload.runtime.loading import loading  # noqa: E402

open_coded_folders()

if TYPE_CHECKING:
    from torch_offload import moe as moe
    from torch_offload.compression.compress import compress as compress
    from torch_offload.integrations.trainer import ReportCallback as ReportCallback
else:

    def __getattr__(name: str) -> Any:
        """Import what needs transformers only when it is asked for."""
        if name == "compress":
            from torch_offload.compression.compress import compress

            return compress
        if name == "moe":
            return importlib.import_module("torch_offload.moe")
        if name == "ReportCallback":
            from torch_offload.integrations.trainer import ReportCallback

            return ReportCallback
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "Config",
    "ConfigError",
    "OffloadError",
    "OutOfTierMemory",
    "PageCorruptError",
    "Plan",
    "Probe",
    "Report",
    "TierIOError",
    "__version__",
    "compress",
    "evict",
    "flush",
    "is_resident",
    "loading",
    "pinned",
    "plan",
    "prefetch",
    "probe",
    "report",
    "unwrap",
    "wrap",
]
