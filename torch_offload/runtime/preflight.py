"""Whether what is to be paged fits: in the budget, and on the disk."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from torch_offload.config import Config, UpdateOn, format_size
from torch_offload.errors import ConfigError, OutOfTierMemory
from torch_offload.runtime.eligibility import why_not_pageable
from torch_offload.system import gpu, resources

SPARE_PAGES = 4
TENSORS_PER_WEIGHT = 4  # itself, its gradient, two moments


def with_device(config: Config) -> Config:
    """Return the configuration with the kind of device that was left open.

    Raises:
        ConfigError: If there is no such device, or what is said of it does not go together.
    """
    if config.device is not None and config.device_kind is None:
        if not gpu.is_there():
            raise ConfigError("device: torch sees no GPU; device_kind='emulated' tries it without one")
        config = config.replace(device_kind="cuda")
    if config.device_kind == "cuda" and not gpu.is_there():
        raise ConfigError("device_kind='cuda': torch sees no GPU; 'emulated' tries a device without one")
    if config.device_kind == "cuda" and "page_elements" not in config.model_fields_set:
        config = config.replace(page_elements=gpu.PAGE_ELEMENTS)
    if config.device is not None and config.compute_bytes <= 0:
        raise ConfigError(
            f"device_unpaged: {format_size(config.unpaged_bytes)} leave nothing for pages of a device of "
            f"{format_size(config.device)}"
        )
    if config.device is None and config.device_kind is not None:
        raise ConfigError(f"device_kind={config.device_kind!r} needs the bytes of its memory, such as device='1GiB'")
    if config.device is None and config.emulated_link is not None:
        raise ConfigError("emulated_link: there is no device; give its bytes, such as device='1GiB'")
    return config


def decided(config: Config, paged: Iterable[torch.Tensor] = ()) -> Config:
    """Return the configuration with the device, the budget and the directory that were left open.

    Raises:
        ConfigError: If the device or the directory cannot be used, or no directory was given and none can be found.
        OutOfTierMemory: If the disk cannot hold what of `paged` the budget does not.
    """
    config = with_device(config)
    paged = list(paged)
    ram = resources.default_ram_bytes() if config.ram is None else config.ram
    needed_bytes = max(0, sum(tensor.untyped_storage().nbytes() for tensor in paged) - ram)
    ssd = config.ssd
    if ssd is None:
        ssd = resources.default_scratch_directory(needed_bytes=needed_bytes)
    directories = (ssd, *config.stripe_over)
    for setting, directory in zip(("ssd", *["stripe_over"] * len(config.stripe_over)), directories, strict=True):
        reason = resources.scratch_refusal(directory)
        if reason is not None:
            raise ConfigError(f"{setting}: {reason}")
    free_bytes = sum(resources.free_disk_bytes(directory) for directory in directories)
    if free_bytes < needed_bytes:
        places = " and ".join(str(directory) for directory in directories)
        raise OutOfTierMemory(
            f"ssd tier: parameters beyond the budget need {needed_bytes} bytes ({format_size(needed_bytes)}) in "
            f"{places}, {free_bytes} bytes are free; give a directory on a larger disk"
        )
    return config.replace(ram=ram, ssd=Path(ssd).resolve(), update_on=place_of_updates(config, paged))


def place_of_updates(config: Config, paged: Iterable[torch.Tensor]) -> UpdateOn:
    """Return where the updates of such tensors run; ``auto`` only where there is no device."""
    if config.update_on != "auto" or config.device is None:
        return config.update_on
    trained_bytes = sum(tensor.untyped_storage().nbytes() for tensor in paged if tensor.requires_grad)
    return "host" if TENSORS_PER_WEIGHT * trained_bytes > config.compute_bytes else "device"


def paged_tensors(module: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    """Return the tensors that will be paged, by name, each storage once. Pre: the device is decided."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if why_not_pageable(tensor, tensor_place(config)) is None and tensor.untyped_storage().nbytes() >= max(
            config.min_paged_bytes, 1
        ):
            found.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))
    return dict(found.values())


def tensor_place(config: Config) -> str:
    """Return where the tensors of a module that is wrapped with such a configuration are."""
    return f"cuda:{gpu.current()}" if config.device_kind == "cuda" else "cpu"


def check_all(config: Config, paged: dict[str, torch.Tensor]) -> None:
    """Refuse a budget in which an operator on the largest tensor, and its gradient, cannot run."""
    if paged:
        name, largest = max(paged.items(), key=lambda entry: entry[1].untyped_storage().nbytes())
        check(config, name, size_bytes=largest.untyped_storage().nbytes(), element_bytes=largest.element_size())


def least_bytes(config: Config, *, size_bytes: int, element_bytes: int) -> int:
    """Return the memory in which an operator on a tensor of this size, and its gradient, can run."""
    page_bytes = min(config.page_elements * element_bytes, size_bytes)
    return 2 * size_bytes + SPARE_PAGES * page_bytes


def check(config: Config, name: str, *, size_bytes: int, element_bytes: int) -> None:
    """Refuse a budget in which an operator on a tensor of this size, and its gradient, cannot run.

    Raises:
        OutOfTierMemory: The message names the tensor and the budget that would do.
    """
    needed_bytes = least_bytes(config, size_bytes=size_bytes, element_bytes=element_bytes)
    tier, setting = ("host", "ram") if config.device is None else ("device", "device")
    available_bytes = config.compute_bytes
    if available_bytes < needed_bytes:
        raise OutOfTierMemory(
            f"{tier} tier: {needed_bytes} bytes ({format_size(needed_bytes)}) needed for {name} ({size_bytes} bytes), "
            f"its gradient and {SPARE_PAGES} pages, {available_bytes} bytes ({format_size(available_bytes)}) "
            f"available; give a {setting} of at least {needed_bytes}"
        )
