"""Measured rates of this machine, cached: disk, memory, processor and GPU."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from torch_offload.diagnostics import compute_rates, paging_cost, ssd_benchmark
from torch_offload.diagnostics.compute_rates import GEMM_TYPES, GpuRates
from torch_offload.errors import ConfigError
from torch_offload.reporting.progress import Show, progress
from torch_offload.reporting.result import Result
from torch_offload.system import environment, gpu
from torch_offload.system.atomic_files import write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from torch_offload.system.tables import Row

logger = logging.getLogger(__name__)

FORMAT = 4  # of the file and of how rates are measured; another one is measured again
SSD_FILE_BYTES = 512 << 20
SSD_BLOCK_BYTES = 4 << 20
SSD_SECONDS = 0.6  # per figure, of which there are 18


class Probe(BaseModel, Result):
    """Measured rates of this machine. Frozen.

    Experimental: may change in a minor release.

    Attributes:
        key: What the figures hold for: processor, cores, torch, GPU, and the disk of the directory.
        ssd_read: Bytes per second that the disk gives to pages.
        ssd_write: The same of writes.
        ssd_mixed: The same of as many reads as writes, both together.
        copy_rate: Bytes per second that one copy within memory reads and writes, together.
        gemm: Floating-point operations per second of a large matrix product, by type.
        update: Elements per second that an optimizer updates in memory, by its name.
        read_cost: Seconds of computing that are lost to a byte of a page that is read.
        write_cost: The same of one that is written.
        gpu: What the GPU can do; None where there is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: dict[str, str]
    ssd_read: float
    ssd_write: float
    ssd_mixed: float
    copy_rate: float
    gemm: dict[str, float]
    update: dict[str, float]
    read_cost: float
    write_cost: float
    gpu: GpuRates | None = None

    @property
    def of_gpu(self) -> GpuRates:
        """What the GPU can do, to plan for it.

        Raises:
            ConfigError: If this machine has none, or it was measured without.
        """
        if self.gpu is None:
            raise ConfigError("probe: it has no rates of a GPU; measure where there is one: torch_offload.probe()")
        return self.gpu

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return self.model_dump(mode="json")

    def __rich__(self) -> "Table":
        """Return it as a table for rich."""
        from torch_offload.system.tables import two_columns

        return two_columns("torch_offload probe", [self._rows()])

    def _rows(self) -> "Iterator[Row]":
        yield "machine", ", ".join(f"{name} {value}" for name, value in self.key.items())
        for name, rate in (("read", self.ssd_read), ("write", self.ssd_write), ("1:1 mix", self.ssd_mixed)):
            yield f"SSD {name}", f"{rate / 1e9:.2f} GB/s"
        yield "memory copy", f"{self.copy_rate / 1e9:.1f} GB/s read and written"
        for name, rate in self.gemm.items():
            yield f"matrix product, {name}", f"{rate / 1e9:.0f} GFLOP/s"
        for name, rate in self.update.items():
            yield f"update, {name}", f"{rate / 1e6:.0f} million elements/s"
        for name, cost in (("read", self.read_cost), ("written", self.write_cost)):
            yield f"computing lost to pages {name}", f"{cost * 1e9:.2f} s/GB"
        if self.gpu is not None:
            yield from _rows_of_gpu(self.gpu)


def _rows_of_gpu(rates: GpuRates) -> "Iterator[Row]":
    yield "to the GPU", f"{rates.to_device / 1e9:.1f} GB/s"
    yield "to the host", f"{rates.to_host / 1e9:.1f} GB/s"
    yield "GPU memory copy", f"{rates.copy_rate / 1e9:.0f} GB/s read and written"
    for name, rate in rates.gemm.items():
        yield f"GPU matrix product, {name}", f"{rate / 1e12:.3g} TFLOP/s"
    for name, rate in rates.update.items():
        yield f"GPU update, {name}", f"{rate / 1e9:.3g} billion elements/s"


def probe(directory: str | os.PathLike[str] | None = None, *, refresh: bool = False, show: Show | None = None) -> Probe:
    """Return what this machine can do. Measured once, in less than a minute; later calls read the user's cache.

    Experimental: may change in a minor release.

    Args:
        directory: On the disk that pages will go to. Default: the one that ``wrap`` would choose.
        refresh: Measure again.
        show: Told what is measured next, how many measurements are done and how many there are.

    Raises:
        ConfigError: If the directory cannot hold pages.
        OutOfTierMemory: If its disk has no room for a small file.
        TierIOError: If a transfer fails.
        OffloadError: If a small network cannot be trained in pages.
    """
    chosen = ssd_benchmark.directory_for(None if directory is None else Path(directory), file_bytes=SSD_FILE_BYTES)
    key = _key(chosen)
    path = _cache_file(key)
    cached = None if refresh else _cached(path, key)
    if cached is not None:
        return cached
    measured = _measure(chosen, key, show or _show_nothing)
    if measured.gpu is not None or not torch.cuda.is_available():
        _keep(path, measured)
    return measured


def probe_with_progress(directory: Path | None, *, refresh: bool = False, progress_on: "Console") -> Probe:
    """Measure; a bar on the console where that is a terminal and something is measured, nothing otherwise."""
    with progress(progress_on, "measuring the machine", uses_lines=False) as show:
        return probe(directory, refresh=refresh, show=show)


def _show_nothing(_what: str, _done: int, _total: int) -> None:
    return


def _key(directory: Path) -> dict[str, str]:
    """Return what the figures depend on."""
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "processor": environment.processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "disk": str(os.stat(directory).st_dev),
        **device,
    }


def _cache_file(key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()
    return environment.cache_directory() / f"probe-{digest[:16]}.json"


def _cached(path: Path, key: dict[str, str]) -> Probe | None:
    try:
        found = Probe.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("what is kept of earlier measurements cannot be read (%s); measuring again", error)
        return None
    return found if found.key == key else None


def _keep(path: Path, measured: Probe) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{measured.model_dump_json(indent=1)}\n".encode())
    except OSError as error:
        logger.warning("measurements are not kept for the next time: %s", error)


def _measure(directory: Path, key: dict[str, str], show: Show) -> Probe:
    has_gpu = torch.cuda.is_available()
    total = 4 + len(GEMM_TYPES) + has_gpu
    show("disk", 0, total)
    disk = _disk_rates(directory)
    show("memory", 1, total)
    copy_rate = compute_rates.copy_rate()
    gemm = {}
    for done, (name, dtype) in enumerate(GEMM_TYPES.items(), start=2):
        show(f"matrix products, {name}", done, total)
        gemm[name] = compute_rates.gemm_rate(dtype)
    show("updates", total - 2 - has_gpu, total)
    update = compute_rates.update_rates()
    show("what moving pages costs", total - 1 - has_gpu, total)
    cost = paging_cost.measure(directory)
    costs = {"read_cost": cost.read, "write_cost": cost.written}
    rates = None
    if has_gpu:
        show("the GPU", total - 1, total)
        rates = _rates_of_gpu()
    return Probe(key=key, **disk, copy_rate=copy_rate, gemm=gemm, update=update, **costs, gpu=rates)


def _rates_of_gpu() -> GpuRates | None:
    """Measure the GPU, if it has room for that; others may use it."""
    try:
        return compute_rates.gpu_rates(f"cuda:{gpu.current()}")
    except torch.OutOfMemoryError as error:
        gpu.give_back_cache()
        logger.warning("the GPU has too little free memory to be measured, and nothing is kept: %s", error)
        return None


def _disk_rates(directory: Path) -> dict[str, float]:
    """Return the best that any queue depth gives: the engine finds its shape out by itself."""
    request = ssd_benchmark.Request(
        directory=directory, file_bytes=SSD_FILE_BYTES, block_bytes=SSD_BLOCK_BYTES, seconds=SSD_SECONDS
    )
    figures = ssd_benchmark.measure(request).figures
    return {
        "ssd_read": max(row.read for row in figures),
        "ssd_write": max(row.write for row in figures),
        "ssd_mixed": max(row.mix for row in figures),
    }
