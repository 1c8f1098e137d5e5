"""Rates of what computes: copies in its memory, matrix products and optimizer updates; and of a GPU's links."""

import logging
import time
from collections.abc import Callable
from statistics import median

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from torch_offload.config import DEFAULT_PAGE_ELEMENTS
from torch_offload.optim.adamw import AdamW
from torch_offload.system import gpu

logger = logging.getLogger(__name__)

ROUNDS = 5
COPY_BYTES = 256 << 20
LINK_BYTES = 256 << 20
GEMM_SIZE = 2048
GEMM_SIZE_OF_GPU = 4096
UPDATED_PAGES = 8
UPDATED_PAGES_OF_GPU = 64
GEMM_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HOST = "cpu"


class GpuRates(BaseModel):
    """Measured rates of a GPU. Frozen.

    Attributes:
        to_device: Bytes per second from page-locked memory of the host.
        to_host: The other way.
        copy_rate: Bytes per second that one copy within its memory reads and writes, together.
        gemm: Floating-point operations per second of a large matrix product, by type.
        update: Elements per second that an optimizer updates in its memory, by its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    to_device: float
    to_host: float
    copy_rate: float
    gemm: dict[str, float]
    update: dict[str, float]


def gpu_rates(device: str) -> GpuRates:
    """Measure a GPU, in about a second. Gives the memory back that this takes."""
    rates = GpuRates(
        to_device=link_rate(device, to_device=True),
        to_host=link_rate(device, to_device=False),
        copy_rate=copy_rate(device),
        gemm={name: gemm_rate(dtype, device) for name, dtype in GEMM_TYPES.items()},
        update=update_rates(device),
    )
    gpu.give_back_cache()
    return rates


def copy_rate(device: str = HOST) -> float:
    """Return the bytes per second that one copy within a memory reads and writes, together."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / _median_seconds(lambda: target.copy_(source), device)


def gemm_rate(dtype: torch.dtype, device: str = HOST) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    size = GEMM_SIZE if device == HOST else GEMM_SIZE_OF_GPU
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    return float(2 * size**3 / _median_seconds(lambda: torch.mm(left, right), device))


def update_rates(device: str = HOST) -> dict[str, float]:
    """Return the elements per second that each optimizer updates: torch's in float32, ours in bfloat16.

    Without ours on a GPU for which the extension has no kernels.
    """
    stock, own = _trained_weights(torch.float32, device), _trained_weights(torch.bfloat16, device)
    rates = {"adamw_torch_fused": _update_rate(torch.optim.AdamW(stock, fused=True), stock)}
    try:
        rates["torch_offload.AdamW"] = _update_rate(AdamW(own), own)
    except NotImplementedError:
        logger.info("the extension has no kernels for %s, so torch_offload.AdamW cannot update there", device)
    return rates


def link_rate(device: str, *, to_device: bool) -> float:
    """Return the bytes per second between page-locked memory of the host and a GPU, one way."""
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    source, target = (here, there) if to_device else (there, here)
    return LINK_BYTES / _median_seconds(lambda: target.copy_(source, non_blocking=True), device)


def _trained_weights(dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Return weights of one page each, with gradients."""
    pages = UPDATED_PAGES if device == HOST else UPDATED_PAGES_OF_GPU
    weights = [nn.Parameter(torch.rand(DEFAULT_PAGE_ELEMENTS, device=device).to(dtype)) for _ in range(pages)]
    for weight in weights:
        weight.grad = torch.rand(DEFAULT_PAGE_ELEMENTS, device=device).to(dtype)
    return weights


def _update_rate(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> float:
    seconds = _median_seconds(optimizer.step, str(weights[0].device))
    return sum(weight.numel() for weight in weights) / seconds


def _median_seconds(work: Callable[[], object], device: str) -> float:
    """Time `work` until the device has done it. It is done once before."""

    def done() -> None:
        work()
        if device != HOST:
            torch.cuda.synchronize(device)

    done()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        done()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
