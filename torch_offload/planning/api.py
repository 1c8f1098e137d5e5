"""What training would take and how fast it would be, said before anything is loaded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_offload.config import Config, parse_size
from torch_offload.diagnostics import ssd_benchmark
from torch_offload.diagnostics.probe import Probe
from torch_offload.diagnostics.probe import probe as probe_machine
from torch_offload.errors import ConfigError
from torch_offload.planning.fake_trace import record
from torch_offload.planning.operator_costs import OperatorCosts
from torch_offload.planning.page_uses import optimizer_named
from torch_offload.planning.plan import Plan
from torch_offload.planning.planner import Question, plan_with
from torch_offload.runtime import preflight
from torch_offload.system import resources

DEFAULT_ENDURANCE_BYTES = 600 * 1000**4
DEFAULT_TIMING_SECONDS = 15.0


def plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    ram: int | str | None = None,
    ssd: str | os.PathLike[str] | None = None,
    device: int | str | None = None,
    config: Config | None = None,
    optimizer: str | None = "adamw_torch_fused",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    probe: Probe | None = None,
    ssd_bytes: int | str | None = None,
    endurance_bytes: int | str = DEFAULT_ENDURANCE_BYTES,
    steps_per_day: float | None = None,
    timing_seconds: float = DEFAULT_TIMING_SECONDS,
) -> Plan:
    """Say what training a module would need, move and take, without loading or training it.

    One forward and backward is recorded on tensors without numbers; its operators are timed alone; its uses of pages
    are replayed under the budgets. The module is not changed, and may be on the meta device.

    Args:
        model: As it will be trained: in training mode, with checkpointing where wanted, frozen where frozen.
        batch: Arguments of its forward by name, labels included, of one micro-batch; meta tensors will do.
        ram: As in ``wrap``.
        ssd: As in ``wrap``.
        device: As in ``wrap``.
        config: All settings; the other arguments take precedence over it.
        optimizer: Whose states and updates there are: ``adamw_torch_fused``, as the Trainer has by default, or
            ``torch_offload.AdamW``; None: gradients only.
        micro_batches: Forward and backward passes per step.
        max_grad_norm: Gradients are clipped to it; None or 0: they are not.
        probe: What the machine can do. Default: ``torch_offload.probe`` of the directory.
        ssd_bytes: What the SSD may hold. Default: what is free on it.
        endurance_bytes: What the SSD is rated to have written in its life (TBW), for its years.
        steps_per_day: How many steps run in a day. Default: one after the other.
        timing_seconds: Time to spend on timing operators, 0 for estimates only.

    Raises:
        ConfigError: If a setting cannot be used.
        OffloadError: If the forward depends on numbers that only a real run knows, or there is no loss.
    """
    given = {name: value for name, value in (("ram", ram), ("ssd", ssd), ("device", device)) if value is not None}
    if micro_batches < 1:
        raise ConfigError(f"micro_batches: must be at least 1, got {micro_batches}")
    known = optimizer_named(optimizer)
    decided, directory = _decided((config or Config()).replace(**given))
    machine = probe or probe_machine(directory)
    recording = record(model, batch)
    question = Question(
        config=decided,
        recording=recording,
        optimizer=known,
        micro_batches=micro_batches,
        is_clipped=bool(max_grad_norm),
        tokens=micro_batches * _tokens_of(batch),
        probe=machine,
        costs=OperatorCosts(machine, limit_seconds=timing_seconds).of(recording.calls),
        ssd_bytes=resources.free_disk_bytes(directory) if ssd_bytes is None else parse_size(ssd_bytes),
        endurance_bytes=parse_size(endurance_bytes),
        steps_per_day=steps_per_day,
    )
    return plan_with(
        question, "host" if preflight.place_of_updates(decided, model.parameters()) == "host" else "device"
    )


def _decided(config: Config) -> tuple[Config, Path]:
    """Return the configuration with a budget, and the directory that pages would go to."""
    directory = ssd_benchmark.directory_for(config.ssd, file_bytes=0)
    ram = resources.default_ram_bytes() if config.ram is None else config.ram
    return config.replace(ram=ram), directory


def _tokens_of(batch: Mapping[str, Any]) -> int:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    whole = [tensor for tensor in tensors if not tensor.dtype.is_floating_point]
    if whole:
        return whole[0].numel()
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 1
