"""The GPU that torch computes on, as far as torch's own allocator is concerned."""

from collections.abc import Callable

import torch

from torch_offload.config import format_size
from torch_offload.errors import ConfigError
from torch_offload.system import environment

MIN_PAGE_ELEMENTS = 2 << 20
"""A GPU's memory is mapped in 2 MiB, and tensors of bytes have to fill that."""

MAX_PAGE_ELEMENTS = 16 << 20
"""Larger pages would save next to no time, and fewer tensors would consist of several."""

MIN_PAGES = 192
"""Of the widest elements that the pages' share of the GPU's memory holds, unless the size of a page is set."""

MIN_PAGES_OF_HOST = 64
"""The same of the memory below it."""

WIDEST_ELEMENT_BYTES = 4

MIN_PAGED_BYTES = 1 << 20
"""Smallest tensor that is paged, unless set: each takes whole frames of 2 MiB, and so do its gradient and states."""


def page_elements(gpu_bytes: int, ram_bytes: int) -> int:
    """Return the elements per page, unless set, where pages have so many bytes of a GPU and of the host.

    The driver takes as long to map a page of any size, so pages are as large as memory still holds enough of.
    """
    most = min(gpu_bytes // MIN_PAGES, ram_bytes // MIN_PAGES_OF_HOST) // WIDEST_ELEMENT_BYTES
    whole = 1 << max(0, most.bit_length() - 1)
    return min(max(whole, MIN_PAGE_ELEMENTS), MAX_PAGE_ELEMENTS)


def why_not_available() -> str | None:
    """Return why torch sees no GPU, and what to do about it; None where it sees one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA: install one that was"
    visible = environment.visible_gpus()
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} leaves none: unset it, or name one that nvidia-smi -L lists"
    return (
        f"there is none, or its driver is older than CUDA {torch.version.cuda}, for which this torch was built: "
        "nvidia-smi shows both; update the driver, or install a torch for an older CUDA"
    )


def current() -> int:
    """Return the number of the GPU that torch uses now."""
    return torch.cuda.current_device()


def check_choice() -> None:
    """Look whether this process has chosen a GPU, where processes train together on a machine that has one for each.

    Raises:
        ConfigError: If it would use the first process's.
    """
    rank, count = environment.local_rank(), environment.process_count()
    if 0 < rank < count <= torch.cuda.device_count() and current() == 0:
        raise ConfigError(
            f"gpu: process {rank} of {count} on this machine would use cuda:0, which is the first one's; call "
            f"torch.cuda.set_device({rank}) before anything is wrapped or loaded"
        )


def cap_memory(size_bytes: int, device: torch.device) -> Callable[[], None]:
    """Cap the GPU memory of torch's allocator at `size_bytes`: beyond it torch raises its own error.

    Returns:
        A function that puts back the cap of before.

    Raises:
        ConfigError: If the GPU has less.
    """
    fraction_before = torch.cuda.get_per_process_memory_fraction(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if size_bytes > total_bytes:
        raise ConfigError(
            f"gpu_reserved: {format_size(size_bytes)} of torch's own allocations do not fit {device}, which has "
            f"{format_size(total_bytes)}"
        )
    torch.cuda.set_per_process_memory_fraction(size_bytes / total_bytes, device)
    return lambda: torch.cuda.set_per_process_memory_fraction(fraction_before, device)


def check_room(size_bytes: int, device: torch.device) -> None:
    """Look whether the GPU has as much memory as torch and pages may take together.

    Raises:
        ConfigError: If other programs, the driver and what torch holds outside of its cache leave less.
    """
    give_back_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if size_bytes > free_bytes:
        raise ConfigError(
            f"gpu: {format_size(size_bytes)} do not fit {device}, where {format_size(free_bytes)} of "
            f"{format_size(total_bytes)} are free; give less, or end what else uses it (nvidia-smi lists it)"
        )


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that nothing has."""
    return int(torch.cuda.mem_get_info(device)[0])


def give_back_cache() -> None:
    """Give back what torch's allocator keeps for itself and pages could use: a module that was there has left."""
    torch.cuda.empty_cache()
