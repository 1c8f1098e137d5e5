"""Steps that were planned, and the engine's counters of the same steps."""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_offload
from support.figures import MACHINE
from torch_offload import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness.belady_check import least_traffic

PAGE = 4096
TOKENS = 48
ROWS = 4
WARM_UP = 4
COUNTED = 3


class Layers(nn.Module):
    """Layers without biases, one behind the other, whose loss is a mean."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(one, other, bias=False) for one, other in pairs)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value)
        return value.square().mean()


def batch_of(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    return {name: torch.ones(rows, tokens, dtype=torch.long) for name in ("input_ids", "labels")}


def plan_of(model: nn.Module, batch: dict[str, Any], config: Config, **options: Any) -> torch_offload.Plan:
    defaults = {"probe": MACHINE, "timing_seconds": 0, "ssd_bytes": "1GiB"}
    return torch_offload.plan(model, batch, config=config, **{**defaults, **options})


def settings(ram: int | str, ssd: str | None = None, **more: Any) -> Config:
    return Config(ram=ram, min_paged_bytes=0, page_elements=PAGE, **{"ssd": ssd, **more} if ssd else more)


def counted_per_step(step: Any) -> dict[str, int]:
    """Take steps; return the bytes of the SSD of those that are steady, each, and the most memory."""
    for _ in range(WARM_UP):
        step()
    before = torch_offload.report()
    for _ in range(COUNTED):
        step()
    after = torch_offload.report()
    return {
        "ssd_read": (after.ssd_read_bytes - before.ssd_read_bytes) // COUNTED,
        "ssd_written": (after.ssd_written_bytes - before.ssd_written_bytes) // COUNTED,
        "peak": after.host_peak_bytes,
        "file": after.ssd_bytes,
    }


def least_per_step(step: Any, ram: int) -> dict[str, int]:
    """Take some more steps; return what the best eviction moves in one of them for the same uses."""
    from torch_offload.runtime.process import PROCESS

    PROCESS.session.engine.start_use_log()
    for _ in range(COUNTED):
        step()
    read, written = least_traffic(PROCESS.session.engine.take_use_log(), ram)
    return {"ssd_read": read, "ssd_written": written}


def training_step(model: nn.Module) -> Any:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    batch = batch_of()

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
