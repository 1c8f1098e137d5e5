"""What can go wrong, as types that a script can catch."""


class OffloadError(Exception):
    """Root of every error that torch_offload raises."""


class OutOfTierMemory(OffloadError, MemoryError):
    """A tier's budget cannot hold what is needed; the message names the tier, the bytes and one remedy."""


class TierIOError(OffloadError, OSError):
    """Reading or writing a tier failed; ``errno`` is set where the system gave one."""


class PageCorruptError(TierIOError):
    """Bytes read back from SSD are not the bytes that were written there."""


class ConfigError(OffloadError, ValueError):
    """A setting that cannot be used."""
