"""``torch_offload.plan``: memory, I/O and time of a training step, before anything is loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from torch_offload.config import Config, Directories, parse_size
from torch_offload.diagnostics import ssd_benchmark
from torch_offload.diagnostics.probe import Probe
from torch_offload.diagnostics.probe import probe as probe_machine
from torch_offload.errors import ConfigError, UnsupportedModelError
from torch_offload.planning.fake_trace import record
from torch_offload.planning.operator_costs import OperatorCosts
from torch_offload.planning.page_uses import optimizer_named
from torch_offload.planning.plan import Plan
from torch_offload.planning.planner import PlanInputs, build_plan
from torch_offload.runtime import preflight, settings
from torch_offload.system import resources

DEFAULT_ENDURANCE_BYTES = 600 * 1000**4
DEFAULT_TIMING_SECONDS = 15.0
UNPLANNED_ACTIVATIONS = ("recompute", "auto")


def plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Config | Mapping[str, Any] | None = None,
    optimizer: str | None = "adamw_torch_fused",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    probe: Probe | None = None,
    ssd_bytes: int | str | None = None,
    endurance_bytes: int | str = DEFAULT_ENDURANCE_BYTES,
    steps_per_day: float | None = None,
    timing_seconds: float = DEFAULT_TIMING_SECONDS,
    **unknown: NoReturn,
) -> Plan:
    """Predict memory, I/O and step time of training a module, without loading or training it.

    One forward and backward is recorded on tensors without numbers; its operators are timed alone; its uses of pages
    are replayed under the budgets. The module is not changed, and may be on the meta device.

    Experimental: may change in a minor release.

    Args:
        model: As it will be trained: in training mode, with checkpointing where wanted, frozen where frozen.
        batch: Arguments of its forward by name, labels included, of one micro-batch; meta tensors will do.
        gpu: As in ``wrap``. A real GPU cannot be planned yet.
        ram: As in ``wrap``.
        ssd: As in ``wrap``.
        config: All settings; the other arguments take precedence over it.
        optimizer: Whose states and updates there are: ``adamw_torch_fused``, as the Trainer has by default, or
            ``torch_offload.AdamW``; None: gradients only.
        micro_batches: Forward and backward passes per step.
        max_grad_norm: Gradients are clipped to it; None or 0: they are not.
        probe: What the machine can do. Default: ``torch_offload.probe`` of the directory.
        ssd_bytes: What the SSD may hold. Default: what is free on it, less ``keep_free``, at most ``max_spill``.
        endurance_bytes: What the SSD is rated to have written in its life (TBW), for its years.
        steps_per_day: How many steps run in a day. Default: one after the other.
        timing_seconds: Time to spend on timing operators, 0 for estimates only.
        **unknown: None; another name is refused with the setting that it may mean.

    Raises:
        ConfigError: If a setting cannot be used.
        UnsupportedModelError: For a real GPU, and for activations that are recomputed.
        OffloadError: If the forward depends on numbers that only a real run knows, or there is no loss.
    """
    settings.check_arguments("plan", unknown)
    if micro_batches < 1:
        raise ConfigError(f"micro_batches: must be at least 1, got {micro_batches}")
    known = optimizer_named(optimizer)
    decided, directories = resolved(settings.requested(config, gpu=gpu, ram=ram, ssd=ssd))
    machine = probe or probe_machine(directories[0])
    recording = record(model, batch)
    inputs = PlanInputs(
        config=decided,
        recording=recording,
        optimizer=known,
        micro_batches=micro_batches,
        is_clipped=bool(max_grad_norm),
        tokens=micro_batches * tokens_of(batch),
        probe=machine,
        costs=OperatorCosts(machine, limit_seconds=timing_seconds).of(recording.calls),
        ssd_bytes=room_of(decided, directories) if ssd_bytes is None else parse_size(ssd_bytes),
        endurance_bytes=parse_size(endurance_bytes),
        steps_per_day=steps_per_day,
    )
    return build_plan(inputs, "host" if preflight.optimizer_device(decided, model.parameters()) == "cpu" else "device")


def room_of(config: Config, directories: Sequence[Path]) -> int:
    return resources.room_for_pages(directories, keep_free=config.keep_free, max_spill=config.max_spill)


def resolved(config: Config) -> tuple[Config, tuple[Path, ...]]:
    """Return the configuration with a budget, and the directories that pages would go to.

    Raises:
        UnsupportedModelError: If a setting cannot be planned yet.
    """
    if config.uses_cuda:
        raise UnsupportedModelError(
            "gpu: plan measures and times this machine's processor, so it cannot plan for a GPU yet; "
            "plan without gpu, or with emulation={'gpu': True} for its memory and traffic"
        )
    if config.activations in UNPLANNED_ACTIVATIONS:
        raise UnsupportedModelError(
            f"activations={config.activations!r} cannot be planned yet; plan 'page' or 'keep', and have the "
            "model itself checkpoint the layers that are recomputed"
        )
    directory = ssd_benchmark.directory_for(config.scratch_directory, file_bytes=0)
    ram = resources.default_ram_bytes() if config.ram is None else config.ram
    return config.replace(ram=ram), (directory, *config.ssd[1:])


def tokens_of(batch: Mapping[str, Any]) -> int:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    whole = [tensor for tensor in tensors if not tensor.dtype.is_floating_point]
    if whole:
        return whole[0].numel()
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 1
