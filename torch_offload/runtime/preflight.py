"""Preflight checks: does the module fit the memory budget and the disk?"""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from torch_offload.config import Config, OptimizerDevice, format_size
from torch_offload.errors import ConfigError, OutOfTierMemory
from torch_offload.runtime.eligibility import why_not_pageable
from torch_offload.runtime.tensor_parts import all_parts_of
from torch_offload.system import environment, gpu, resources

logger = logging.getLogger(__name__)

SPARE_PAGES = 4
TENSORS_PER_WEIGHT = 4  # itself, its gradient, two moments


def check_gpu(config: Config) -> Config:
    """Return the configuration with pages of the size that a real GPU needs.

    Raises:
        ConfigError: If there is no such GPU, or its settings contradict each other.
    """
    if config.uses_cuda:
        why_not = gpu.why_not_available()
        if why_not is not None:
            raise ConfigError(
                f"gpu: torch sees no GPU: {why_not}; or leave the setting out, or try emulation={{'gpu': True}}"
            )
        gpu.check_choice()
    if config.gpu is not None and config.compute_bytes <= 0:
        raise ConfigError(
            f"gpu_reserved: {format_size(config.reserved_bytes)} leave nothing for pages of the "
            f"{format_size(config.gpu)} of gpu; reserve less, or give a larger gpu"
        )
    if config.gpu is None and config.is_gpu_emulated:
        raise ConfigError("emulation.gpu needs the size of the GPU's memory, such as gpu='1GiB'")
    if config.link_rate is not None and not config.is_gpu_emulated:
        raise ConfigError("emulation.link_rate needs an emulated GPU: gpu='1GiB', emulation={'gpu': True, ...}")
    if not config.uses_cuda:
        return config
    defaults = {
        "page_elements": gpu.page_elements(config.compute_bytes, _ram_bytes(config)),
        "min_paged_bytes": gpu.MIN_PAGED_BYTES,
    }
    return config.replace(**{name: value for name, value in defaults.items() if name not in config.model_fields_set})


def resolve(config: Config, paged: Iterable[torch.Tensor] = ()) -> Config:
    """Return the configuration with every setting decided that was left open.

    Raises:
        ConfigError: If the GPU or a directory cannot be used, or no directory was given and none can be found.
        OutOfTierMemory: If the disks cannot hold the part of `paged` that memory cannot.
    """
    config = check_gpu(config)
    paged = list(paged)
    ram = _ram_bytes(config)
    _warn_of_small_memory(ram)
    updates_on = optimizer_device(config, paged)
    _warn_of_other_bits(config, updates_on)
    if config.stores:  # which say themselves what they have no room for
        return config.replace(ram=ram, optimizer_device=updates_on)
    needed_bytes = max(0, sum(tensor.untyped_storage().nbytes() for tensor in paged) - ram)
    directories = config.directories_of(environment.local_rank()) or (
        _default_directory(config, needed_bytes=needed_bytes),
    )
    check_directories(directories)
    _warn_of_one_disk(config)
    free_bytes = resources.room_for_pages(directories, keep_free=config.keep_free, max_spill=config.max_spill)
    if free_bytes < needed_bytes:
        raise OutOfTierMemory(
            f"ssd tier: parameters beyond the budget need {needed_bytes} bytes ({format_size(needed_bytes)}) in "
            f"{' and '.join(map(str, directories))}, {free_bytes} bytes are free"
            f"{_limits(config, directories)}; give a directory on a larger disk"
        )
    _warn_of_small_disk(directories, paged, ram=ram, free_bytes=free_bytes)
    for directory in directories:
        for warning in resources.scratch_warnings(directory):
            logger.warning("ssd: %s", warning)
    return config.replace(ram=ram, ssd=directories, optimizer_device=updates_on)


def _ram_bytes(config: Config) -> int:
    """Return the budget that was given, or this process's part of the usual one."""
    if config.ram is not None:
        return config.ram
    total_bytes, sharing = resources.default_ram_bytes(), environment.process_count()
    if sharing > 1:
        logger.info("ram: %d processes share %s", sharing, format_size(total_bytes))
    return total_bytes // sharing


def _warn_of_small_memory(ram: int) -> None:
    """Say so where no process here can have as much as the budget."""
    limit_bytes = resources.memory_limit_bytes()
    if limit_bytes is not None and ram > limit_bytes:
        logger.warning(
            "ram: a budget of %s, and this process may have %s in all (memory of the system, limits of its cgroups): "
            "the system would end it before the budget is full; lower ram",
            format_size(ram),
            format_size(limit_bytes),
        )


def _warn_of_other_bits(config: Config, updates_on: OptimizerDevice) -> None:
    """Say so where updates will run on the CPU, and nobody asked for it."""
    if config.uses_cuda and config.optimizer_device == "auto" and updates_on == "cpu":
        logger.warning(
            "optimizer_device: what trains does not fit the GPU with its gradients and moments, so updates run on the "
            "CPU, whose kernels may differ in the last bits from the GPU's; to have the same bits as in the GPU give "
            "optimizer_device='gpu' (more bytes go over the link), to keep it so without this warning 'cpu'"
        )


def _default_directory(config: Config, *, needed_bytes: int) -> Path:
    chosen = resources.default_scratch_directory(needed_bytes=needed_bytes, keep_free=config.keep_free)
    return chosen.resolve()


def _limits(config: Config, directories: Iterable[Path]) -> str:
    """Say what settings leave of the disks, where they leave anything."""
    kept = sum(resources.kept_bytes(directory, keep_free=config.keep_free) for directory in directories)
    said = [f"beside {kept} that stay so (keep_free)"] if kept else []
    said += [] if config.max_spill is None else [f"of at most {config.max_spill} (max_spill)"]
    return f" {' and '.join(said)}" if said else ""


def _warn_of_small_disk(
    directories: Iterable[Path], paged: Iterable[torch.Tensor], *, ram: int, free_bytes: int
) -> None:
    """Say so where the parameters fit the disk, and training them with two moments each would not."""
    sizes = ((tensor.untyped_storage().nbytes(), tensor.requires_grad) for tensor in paged)
    needed_bytes = sum(size * (TENSORS_PER_WEIGHT if is_trained else 1) for size, is_trained in sizes) - ram
    if free_bytes < needed_bytes:
        logger.warning(
            "ssd: training all parameters with two moments each takes up to %s beyond the budget; %s are free in %s",
            format_size(needed_bytes),
            format_size(free_bytes),
            " and ".join(map(str, directories)),
        )


def check_directories(directories: Iterable[Path]) -> None:
    """Refuse directories that pages cannot go to.

    Raises:
        ConfigError: For the first of them; the message names it and the remedy.
    """
    for directory in directories:
        reason = resources.scratch_refusal(directory)
        if reason is not None:
            raise ConfigError(f"ssd: {reason}")


def _warn_of_one_disk(config: Config) -> None:
    """Say so, in the first process of a machine, where its processes have directories of their own on one disk."""
    found: dict[int, tuple[int, Path]] = {}
    for number in range(environment.process_count() if environment.is_first_process() else 0):
        for directory in config.directories_of(number):
            try:
                file_system = directory.stat().st_dev
            except OSError:  # it is another process's, which refuses it
                continue
            other, where = found.setdefault(file_system, (number, directory))
            if other != number and where != directory:
                logger.warning(
                    "ssd: processes %d and %d have directories on one file system, %s and %s, and share its rate; "
                    "where {local_rank} is to give each a disk of its own, mount them there",
                    other,
                    number,
                    where,
                    directory,
                )
                return


def optimizer_device(config: Config, paged: Iterable[torch.Tensor]) -> OptimizerDevice:
    """Return where the updates of such tensors run; ``auto`` only where there is no GPU."""
    if config.optimizer_device != "auto" or config.gpu is None:
        return config.optimizer_device
    if config.update == "backward":
        return "gpu"
    trained_bytes = sum(tensor.untyped_storage().nbytes() for tensor in paged if tensor.requires_grad)
    return "cpu" if TENSORS_PER_WEIGHT * trained_bytes > config.compute_bytes else "gpu"


def paged_tensors(module: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    """Return the tensors that will be paged, by name, each storage once. Pre: the device is decided."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in all_parts_of([*module.named_parameters(), *module.named_buffers()]):
        if why_not_pageable(tensor, compute_device(config)) is None and tensor.untyped_storage().nbytes() >= max(
            config.min_paged_bytes, 1
        ):
            found.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))
    return dict(found.values())


def compute_device(config: Config) -> str:
    """Return where the tensors of a module that is wrapped with such a configuration are."""
    return f"cuda:{gpu.current()}" if config.uses_cuda else "cpu"


def check_all(config: Config, module: nn.Module, paged: dict[str, torch.Tensor]) -> None:
    """Refuse a budget in which an operator on the largest tensor, and its gradient, cannot run, or that has too many
    pages for the system. Of a frozen embedding, operators need some rows only.

    Raises:
        OutOfTierMemory: As from :func:`check`.
        ConfigError: As from :func:`check_mappings`.
    """
    largest = _largest_whole(config, module, paged)
    if largest is not None:
        name, tensor = largest
        check(config, name, size_bytes=tensor.untyped_storage().nbytes(), element_bytes=tensor.element_size())
    if paged:
        check_mappings(config, paged.values())


def needed_bytes(config: Config, module: nn.Module, paged: dict[str, torch.Tensor]) -> int:
    """Return the least memory in which operators on each tensor of the module can run."""
    largest = _largest_whole(config, module, paged)
    if largest is None:
        return 0
    _, tensor = largest
    return least_bytes(config, size_bytes=tensor.untyped_storage().nbytes(), element_bytes=tensor.element_size())


def _largest_whole(
    config: Config, module: nn.Module, paged: dict[str, torch.Tensor]
) -> tuple[str, torch.Tensor] | None:
    """Return the largest tensor of which operators need more than some rows, with its name."""
    by_rows = set() if config.uses_cuda else _looked_up_by_rows(module, compute_device(config))
    whole = {name: tensor for name, tensor in paged.items() if tensor.untyped_storage().data_ptr() not in by_rows}
    return max(whole.items(), key=lambda entry: entry[1].untyped_storage().nbytes(), default=None)


def _looked_up_by_rows(module: nn.Module, device: str) -> set[int]:
    """Return the addresses of the tables of which only embeddings and their bags read, and that do not train."""
    tables: set[int] = set()
    others: set[int] = set()
    for part in module.modules():
        for name, tensor in all_parts_of([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]):
            if why_not_pageable(tensor, device) is not None:
                continue
            is_table = is_embedding_table(part, name) and not tensor.requires_grad
            (tables if is_table else others).add(tensor.untyped_storage().data_ptr())
    return tables - others


def check_laid_out(config: Config, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of a module that is being built as :func:`check` does, but for a table that may be read by rows:
    whether it is, `wrap` knows.

    Raises:
        OutOfTierMemory: As from :func:`check`.
    """
    if config.uses_cuda or not is_embedding_table(module, name):
        label = f"{type(module).__name__}.{name}"
        check(config, label, size_bytes=tensor.nbytes, element_bytes=tensor.element_size())


def is_embedding_table(module: nn.Module, name: str) -> bool:
    """Whether that tensor of the module is read row by row, as long as it does not train."""
    if name != "weight" or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is not None:
        return False
    return isinstance(module, nn.Embedding) or module.mode != "max"


def check_mappings(config: Config, paged: Iterable[torch.Tensor], *, root: Path = Path("/")) -> None:
    """Refuse pages, of parameters, gradients and moments, that are more than the system can map at once.

    Raises:
        ConfigError: If the budget is filled with so many. The message names the limit and three remedies.
    """
    allowed = resources.max_mappings(root=root)
    if allowed is None or config.ram is None or config.uses_cuda:
        return
    tensors = list(paged)
    filled_bytes = min(config.ram, TENSORS_PER_WEIGHT * sum(tensor.untyped_storage().nbytes() for tensor in tensors))
    page_bytes = config.page_elements * min(tensor.element_size() for tensor in tensors)
    needed = resources.MAPPINGS_PER_PAGE * (filled_bytes // page_bytes)
    if needed > allowed:
        raise ConfigError(
            f"ram: {format_size(config.ram)} hold {filled_bytes // page_bytes} pages of {page_bytes} bytes, which take "
            f"up to {needed} memory mappings; this system allows {allowed} (vm.max_map_count). As root: sysctl -w "
            f"vm.max_map_count={2 * needed}; or give a smaller ram, or larger page_elements"
        )


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
    tier, setting = ("host", "ram") if config.gpu is None else ("device", "gpu")
    available_bytes = config.compute_bytes
    if available_bytes < needed_bytes:
        raise OutOfTierMemory(
            f"{tier} tier: {needed_bytes} bytes ({format_size(needed_bytes)}) needed for {name} ({size_bytes} bytes), "
            f"its gradient and {SPARE_PAGES} pages, {available_bytes} bytes ({format_size(available_bytes)}) "
            f"available; give a {setting} of at least {needed_bytes}"
        )
