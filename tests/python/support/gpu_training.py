"""Training in a GPU, plain or paged, for a torch that has nothing beside it: on a real one and on the fake one."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torch_offload
from support.bits import digest
from torch_offload import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from models.bare_llama import BareLlama, Shape

STEPS = 4
MI = 1 << 20
Outcome = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Size:
    """A model, and settings that give it less than its state in the GPU and in memory together."""

    shape: Shape
    settings: dict[str, Any]

    def config(self, scratch: str, **settings: Any) -> Config:
        return Config(**{"ssd": scratch, **self.settings, **settings})


REAL = Size(  # 337 M parameters
    Shape(hidden=2048, intermediate=5504, layers=6, heads=16, vocabulary=8192),
    {"gpu": 1792 * MI, "gpu_reserved": 1024 * MI, "ram": 512 * MI},
)
FAKE = Size(
    Shape(hidden=128, intermediate=256, layers=4, heads=4, vocabulary=512, has_fused_attention=False),
    {"gpu": 2 * MI, "gpu_reserved": MI, "ram": 1 * MI, "min_paged_bytes": 4096, "page_elements": 1 << 13},
)


def train(
    optimizer: str, shape: Shape, config: Config | None, *, max_grad_norm: float | None = 0.5
) -> tuple[Outcome, Any]:
    """Return every loss, hashes of all weights and states, and the report. Plain, without one, without a configuration.

    The engine ends with it, and so does the cap on torch's memory.
    """
    torch.manual_seed(0)
    model = BareLlama(shape).to(torch.bfloat16 if optimizer == "own" else torch.float32)
    if config is None:
        model.cuda()
    else:
        torch_offload.wrap(model, config=config)
    make = {
        "own": lambda: torch_offload.AdamW(model.parameters(), lr=1e-3, moments="8bit"),
        "fused": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        "foreach": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }
    chosen = make[optimizer]()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randint(0, shape.vocabulary, (2, 32), generator=generator).cuda())
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item().hex())
    digests = {}
    for name, weight in model.named_parameters():
        digests[name] = digest(weight)
        states = chosen.state[weight].items()
        digests |= {f"{name}.{key}": digest(value) for key, value in states if isinstance(value, torch.Tensor)}
    if config is None:
        return (losses, digests), None
    report = torch_offload.report()
    torch_offload.unwrap(model)
    return (losses, digests), report


def train_both(optimizer: str, size: Size, scratch: str, settings: dict[str, Any]) -> tuple[Outcome, Outcome, Any]:
    """Train plain, then paged, in this process; return also the engine's report."""
    max_grad_norm = 0.5 if settings.get("update", "step") == "step" else None
    plain, _ = train(optimizer, size.shape, None, max_grad_norm=max_grad_norm)
    paged, report = train(optimizer, size.shape, size.config(scratch, **settings), max_grad_norm=max_grad_norm)
    return plain, paged, report


def check(plain: Outcome, paged: Outcome, report: Any) -> None:
    """Everything is equal, within the budgets, and bytes moved on every link."""
    assert paged[0] == plain[0]
    assert len(set(plain[0])) == STEPS
    assert [name for name in plain[1] if paged[1].get(name) != plain[1][name]] == []
    assert report.device.name.startswith("cuda")
    assert report.device.peak_bytes <= report.device.budget_bytes
    assert report.host_peak_bytes <= report.budget_bytes
    assert sum(report.device.to_device_bytes.values()) > 0
    assert sum(report.device.to_host_bytes.values()) > 0
    assert report.ssd_read_bytes > 0
