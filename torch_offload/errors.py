"""The types of all errors that torch_offload raises."""

import re
from collections.abc import Sequence


class OffloadError(Exception):
    """Root of every error that torch_offload raises."""


class OutOfTierMemory(OffloadError, MemoryError, RuntimeError):
    """A tier cannot hold the bytes that an operation needs. The message names the tier, the bytes and one remedy.

    A ``RuntimeError`` whose message has the words of torch's own, so that ``accelerate.find_executable_batch_size`` and
    ``auto_find_batch_size`` of a ``Trainer`` try a smaller batch.
    """

    def __init__(self, message: str) -> None:
        """Begin the message with the words of torch, where the tier is memory."""
        super().__init__(re.sub(r"^((?:host|device|gpu)(?: memory)? tier): (?!out)", r"\1: out of memory. ", message))


class TierIOError(OffloadError, OSError):
    """Reading or writing a tier failed; ``errno`` is set where the system gave one."""


class PageCorruptError(TierIOError):
    """Bytes read back from SSD are not the bytes that were written there."""


class ConfigError(OffloadError, ValueError):
    """Settings that cannot be used.

    Attributes:
        problems: Name and problem of each setting, where several were checked together.
    """

    problems: Sequence[tuple[str, str]] = ()


class CheckpointError(OffloadError, ValueError):
    """A file or folder that is damaged, incomplete, or of an unknown format."""


class UnsupportedModelError(OffloadError, NotImplementedError):
    """A model, layout, data type or operation that torch_offload does not support."""
