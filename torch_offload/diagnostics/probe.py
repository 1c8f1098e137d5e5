"""Measured rates of this machine, cached: disk, memory, processor and GPU."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from torch_offload.config import DEFAULT_PAGE_ELEMENTS
from torch_offload.diagnostics import paging_cost, ssd_benchmark
from torch_offload.optim.adamw import AdamW
from torch_offload.reporting.progress import Show, progress
from torch_offload.reporting.result import Result
from torch_offload.system import environment
from torch_offload.system.atomic_files import write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from torch_offload.system.tables import Row

logger = logging.getLogger(__name__)

FORMAT = 3  # of the file and of how rates are measured; another one is measured again
ROUNDS = 5
SSD_FILE_BYTES = 512 << 20
SSD_BLOCK_BYTES = 4 << 20
SSD_SECONDS = 0.6  # per figure, of which there are 18
COPY_BYTES = 256 << 20
LINK_BYTES = 256 << 20
GEMM_SIZE = 2048
UPDATED_PAGES = 8
GEMM_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Probe(BaseModel, Result):
    """Measured rates of this machine. Frozen.

    Experimental: may change in a minor release.

    Attributes:
        key: What the figures hold for: processor, cores, torch, and the disk of the directory.
        ssd_read: Bytes per second that the disk gives to pages.
        ssd_write: The same of writes.
        ssd_mixed: The same of as many reads as writes, both together.
        copy_rate: Bytes per second that one copy within memory reads and writes, together.
        gemm: Floating-point operations per second of a large matrix product, by type.
        update: Elements per second that an optimizer updates in memory, by its name.
        read_cost: Seconds of computing that are lost to a byte of a page that is read.
        write_cost: The same of one that is written.
        to_device: Bytes per second from pinned memory to a GPU; None where there is none.
        to_host: The other way.
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
    to_device: float | None = None
    to_host: float | None = None

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
        for name, link in (("to the device", self.to_device), ("to the host", self.to_host)):
            if link is not None:
                yield name, f"{link / 1e9:.1f} GB/s"


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
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "processor": environment.processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "disk": str(os.stat(directory).st_dev),
        **gpu,
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
    copy_rate = _copy_rate()
    gemm = {}
    for done, (name, dtype) in enumerate(GEMM_TYPES.items(), start=2):
        show(f"matrix products, {name}", done, total)
        gemm[name] = _gemm_rate(dtype)
    show("updates", total - 2 - has_gpu, total)
    update = {"adamw_torch_fused": _stock_update_rate(), "torch_offload.AdamW": _own_update_rate()}
    show("what moving pages costs", total - 1 - has_gpu, total)
    cost = paging_cost.measure(directory)
    costs = {"read_cost": cost.read, "write_cost": cost.written}
    links: dict[str, float] = {}
    if has_gpu:
        show("links of the GPU", total - 1, total)
        links = {"to_device": _link_rate(to_device=True), "to_host": _link_rate(to_device=False)}
    return Probe(key=key, **disk, copy_rate=copy_rate, gemm=gemm, update=update, **costs, **links)


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


def _median_seconds(work: Callable[[], object]) -> float:
    """Time `work`, which is done once before."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _copy_rate() -> float:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / _median_seconds(lambda: target.copy_(source))


def _gemm_rate(dtype: torch.dtype) -> float:
    left = torch.rand(GEMM_SIZE, GEMM_SIZE).to(dtype)
    right = torch.rand(GEMM_SIZE, GEMM_SIZE).to(dtype)
    return float(2 * GEMM_SIZE**3 / _median_seconds(lambda: torch.mm(left, right)))


def _stock_update_rate() -> float:
    weights = _trained_weights(torch.float32)
    return _update_rate(torch.optim.AdamW(weights, fused=True), weights)


def _own_update_rate() -> float:
    weights = _trained_weights(torch.bfloat16)
    return _update_rate(AdamW(weights), weights)


def _trained_weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return weights of one page each, with gradients."""
    weights = [nn.Parameter(torch.rand(DEFAULT_PAGE_ELEMENTS).to(dtype)) for _ in range(UPDATED_PAGES)]
    for weight in weights:
        weight.grad = torch.rand(DEFAULT_PAGE_ELEMENTS).to(dtype)
    return weights


def _update_rate(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> float:
    return sum(weight.numel() for weight in weights) / _median_seconds(optimizer.step)


def _link_rate(*, to_device: bool) -> float:
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if to_device else (device, host)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return LINK_BYTES / _median_seconds(copy)
