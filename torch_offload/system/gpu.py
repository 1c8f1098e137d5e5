"""The GPU that torch computes on, as far as torch's own allocator is concerned."""

from collections.abc import Callable

import torch

from torch_offload.config import format_size
from torch_offload.errors import ConfigError

PAGE_ELEMENTS = 2 << 20
"""Elements per page, unless set: a GPU's memory is mapped in 2 MiB, and tensors of bytes have to fill that."""


def is_available() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def current() -> int:
    """Return the number of the GPU that torch uses now."""
    return torch.cuda.current_device()


def cap_memory(size_bytes: int, device: torch.device) -> Callable[[], None]:
    """Cap the GPU memory of torch's allocator at `size_bytes`: beyond it torch raises its own error.

    Returns:
        A function that lifts the cap.

    Raises:
        ConfigError: If the GPU has less.
    """
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if size_bytes > total_bytes:
        raise ConfigError(
            f"gpu_reserved: {format_size(size_bytes)} of torch's own allocations do not fit {device}, which has "
            f"{format_size(total_bytes)}"
        )
    torch.cuda.set_per_process_memory_fraction(size_bytes / total_bytes, device)
    return lambda: torch.cuda.set_per_process_memory_fraction(1.0, device)
