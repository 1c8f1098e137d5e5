"""``torch_offload.plan``: memory, I/O and time of a step, before anything is loaded."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, overload

from torch import Tensor, nn

from torch_offload.activations.recompute import ActivationChoice, layers_of
from torch_offload.config import Config, Directories, Settings, parse_size
from torch_offload.diagnostics import ssd_benchmark
from torch_offload.diagnostics.probe import Probe
from torch_offload.diagnostics.probe import probe as probe_machine
from torch_offload.errors import ConfigError
from torch_offload.planning import recomputing
from torch_offload.planning.fake_trace import Recording, record
from torch_offload.planning.forward_trace import PROMPT, TOKEN, record_evaluation, record_prompt, record_token
from torch_offload.planning.operator_costs import Cost, OperatorCosts
from torch_offload.planning.pipeline_plan import PipelinePlan
from torch_offload.planning.pipeline_planner import (
    PipelinePlanner,
    PipelineRequest,
    check_can_be_replayed,
    check_others,
)
from torch_offload.planning.plan import Plan, Work
from torch_offload.planning.planner import PlanInputs, PlannedMachine, PlannedStep, build_plan, check_updates
from torch_offload.planning.quantized_weights import check_can_run_forward
from torch_offload.planning.stages import layers_to_divide
from torch_offload.runtime import preflight, settings
from torch_offload.system import resources

DEFAULT_ENDURANCE_BYTES = 600 * 1000**4
DEFAULT_TIMING_SECONDS = 15.0
DEFAULT_OPTIMIZER = "adamw_torch_fused"


@overload
def plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    work: Work = "train",
    new_tokens: int | None = None,
    optimizer: str | None = DEFAULT_OPTIMIZER,
    moments: str = "fp32",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    loaded: Iterable[Tensor] = (),
    processes: int = 1,
    probe: Probe | None = None,
    ssd_bytes: int | str | None = None,
    endurance_bytes: int | str = DEFAULT_ENDURANCE_BYTES,
    steps_per_day: float | None = None,
    timing_seconds: float = DEFAULT_TIMING_SECONDS,
    schedule: None = None,
    **unknown: NoReturn,
) -> Plan: ...


@overload
def plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    optimizer: str | None = DEFAULT_OPTIMIZER,
    moments: str = "fp32",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    loaded: Iterable[Tensor] = (),
    processes: int = 1,
    ssd_bytes: int | str | None = None,
    schedule: str,
    ranks: int,
    stages: int | None = None,
    **unknown: NoReturn,
) -> PipelinePlan: ...


def plan(
    model: nn.Module, batch: Mapping[str, Any], *, schedule: str | None = None, **arguments: Any
) -> Plan | PipelinePlan:
    """Predict memory, I/O and time of a step with a module, without loading or training it.

    Each pass of a step is recorded once on tensors without numbers; its operators are timed alone; its uses of pages
    are replayed under the budgets. The module is not changed, and may be on the meta device.

    With a ``schedule`` the plan is of the ranks of a pipeline: the layers of the module are divided into stages, the
    calls of which are replayed in the order in which torch's schedule makes them. It has no times.

    Experimental: may change in a minor release.

    Args:
        model: As it will be trained: in training mode, with checkpointing where wanted, frozen where frozen.
        batch: Arguments of its forward by name, of one micro-batch; meta tensors will do. With labels to train, with
            ``input_ids`` of the prompt to generate.
        gpu: As in ``wrap``. A real GPU has to be there: its kernels are chosen and timed.
        ram: As in ``wrap``.
        ssd: As in ``wrap``.
        config: All settings; the other arguments take precedence over it.
        work: What a step is: ``train``; ``evaluate``, a forward of the batch; ``generate``, the prompt and all new
            tokens. The last two are without gradients, in evaluation mode.
        new_tokens: Of each row, to generate.
        optimizer: Whose states and updates there are: ``adamw_torch_fused``, ``torch_offload.AdamW``, or None.
        moments: How ``torch_offload.AdamW`` keeps its moments: ``fp32`` or ``8bit``.
        micro_batches: Forward and backward passes per step.
        max_grad_norm: Gradients are clipped to it; None or 0: they are not.
        loaded: Tensors of the module that a checkpoint has in their dtype; see the setting ``checkpoint_pages``.
        processes: How many like this one share memory, disk and processor; the plan is of one of them.
        probe: What the machine can do. Default: ``torch_offload.probe`` of the directory.
        ssd_bytes: What the SSD may hold. Default: what is free on it, less ``keep_free``, at most ``max_spill``.
        endurance_bytes: What the SSD is rated to have written in its life (TBW), for its years.
        steps_per_day: How many steps run in a day. Default: one after the other.
        timing_seconds: Time to spend on timing operators, 0 for estimates only.
        schedule: ``1F1B``, ``GPipe``, ``Interleaved1F1B`` or ``LoopedBFS`` of ``torch.distributed.pipelining``, or
            ``auto`` for all of them. Budgets are then those of a rank.
        ranks: Of the pipeline.
        stages: Of the pipeline, of equally many layers each. Default: each number that is possible.
        **arguments: All but the first two and ``schedule``; another name is refused with the setting that it may mean.

    Raises:
        ConfigError: If a setting cannot be used.
        UnsupportedModelError: For weights quantized otherwise than to bitsandbytes' 4 bits, and for pipelines of
            modules without layers or with trained weights that stages would share.
        OffloadError: If the forward depends on numbers that only a real run knows, or has no loss or cache.
    """
    if schedule is not None:
        return pipeline_plan(model, batch, schedule=schedule, **arguments)
    for name in ("ranks", "stages"):
        if (value := arguments.pop(name, None)) is not None:
            raise ConfigError(f"{name}: {value} are of a pipeline; give its schedule as well, or schedule='auto'")
    return step_plan(model, batch, **arguments)


def step_plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    work: Work = "train",
    new_tokens: int | None = None,
    optimizer: str | None = DEFAULT_OPTIMIZER,
    moments: str = "fp32",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    loaded: Iterable[Tensor] = (),
    processes: int = 1,
    probe: Probe | None = None,
    ssd_bytes: int | str | None = None,
    endurance_bytes: int | str = DEFAULT_ENDURANCE_BYTES,
    steps_per_day: float | None = None,
    timing_seconds: float = DEFAULT_TIMING_SECONDS,
    **unknown: NoReturn,
) -> Plan:
    """Plan a step of one process; arguments and errors are those of :func:`plan`."""
    settings.check_arguments("plan", unknown)
    step = PlannedStep.of(work, new_tokens, optimizer, moments, micro_batches, clipped=bool(max_grad_norm))
    decided, directories = resolved(settings.requested(config, gpu=gpu, ram=ram, ssd=ssd), processes)
    check_updates(decided, step)
    free_bytes = room_of(decided, directories) if ssd_bytes is None else parse_size(ssd_bytes)
    machine = PlannedMachine(
        probe or probe_machine(directories[0]), processes, free_bytes // processes, parse_size(endurance_bytes)
    )
    costs = OperatorCosts(machine.probe, limit_seconds=timing_seconds)
    return _Planning(model, batch, list(loaded), decided, step, machine, costs, steps_per_day).plan()


def pipeline_plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    optimizer: str | None = DEFAULT_OPTIMIZER,
    moments: str = "fp32",
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    loaded: Iterable[Tensor] = (),
    processes: int = 1,
    ssd_bytes: int | str | None = None,
    schedule: str,
    ranks: int | None = None,
    stages: int | None = None,
    **others: Any,
) -> PipelinePlan:
    """Plan the ranks of a pipeline; arguments and errors are those of :func:`plan`."""
    request = PipelineRequest.of(schedule, ranks, stages)
    check_others(others)
    step = PlannedStep.of("train", None, optimizer, moments, micro_batches, clipped=bool(max_grad_norm))
    decided, directories = resolved(settings.requested(config, ram=ram, ssd=ssd), processes)
    check_can_be_replayed(decided)
    free_bytes = room_of(decided, directories) if ssd_bytes is None else parse_size(ssd_bytes)
    layers = layers_to_divide(model)
    again = recomputing.layers_to_recompute(model) if decided.activations == "recompute" else {}
    with recomputing.recomputed(again.values()):
        recording = record(model, batch, loaded=list(loaded), cut_at=layers)
    planner = PipelinePlanner(
        config=decided, step=step, recording=recording, layers=len(layers), ssd_bytes=free_bytes // processes
    )
    return planner.plan(request)


@dataclass(frozen=True)
class _Planning:
    """A plan to be made."""

    model: nn.Module
    batch: Mapping[str, Any]
    loaded: list[Tensor]
    config: Config
    step: PlannedStep
    machine: PlannedMachine
    costs: OperatorCosts
    steps_per_day: float | None

    def plan(self) -> Plan:
        """Record what a step consists of, and plan it."""
        if self.step.work != "train":
            check_can_run_forward(self.model)
            passes, seconds = self._forward_passes()
            return self._built(passes[0], seconds, passes=passes)
        if self.config.activations == "recompute":
            layers = recomputing.layers_to_recompute(self.model)
            asked = ActivationChoice(recomputed=sorted(layers), explanation=recomputing.ALL_RECOMPUTED)
            return self._recomputed(layers, asked)
        if self.config.activations == "auto":
            return self._chosen()
        return self._trained(self._recorded())

    def _chosen(self) -> Plan:
        """Plan a step of which the engine chooses the layers that compute their activations again."""
        layers = dict(layers_of(self.model))
        recording = self._recorded(layers)
        paged = self._trained(recording)
        if not layers:
            return paged
        seconds = self.costs.of({name: layer.calls for name, layer in recording.layers.items()})
        choice = recomputing.choose(paged, recording, seconds, min_paged_bytes=self.config.min_paged_bytes)
        return self._recomputed(layers, choice) if choice.recomputed else dataclasses.replace(paged, activations=choice)

    def _recomputed(self, layers: Mapping[str, nn.Module], choice: ActivationChoice) -> Plan:
        with recomputing.recomputed([layers[name] for name in choice.recomputed]):
            recording = self._recorded()
        return self._trained(recording, choice)

    def _recorded(self, layers: Mapping[str, nn.Module] = MappingProxyType({})) -> Recording:
        return record(
            self.model, self.batch, loaded=self.loaded, layers=layers, device=preflight.compute_device(self.config)
        )

    def _trained(self, recording: Recording, choice: ActivationChoice | None = None) -> Plan:
        return self._built(recording, self.costs.of(recording.calls), activations=choice)

    def _built(self, recording: Recording, seconds: dict[str, Cost], **more: Any) -> Plan:
        inputs = PlanInputs(
            config=self.config,
            recording=recording,
            step=self.step,
            machine=self.machine,
            tokens=self._tokens(),
            costs=seconds,
            steps_per_day=self.steps_per_day,
            **more,
        )
        is_on_host = preflight.optimizer_device(self.config, self.model.parameters()) == "cpu"
        return build_plan(inputs, "host" if is_on_host else "device")

    def _forward_passes(self) -> tuple[tuple[Recording, ...], dict[str, Cost]]:
        """Record the passes of an evaluation or a generation, and return their costs by phase.

        Keys and values grow from token to token: memory is that of the last one, time the mean of the first and the
        last.
        """
        given: dict[str, Any] = {"loaded": self.loaded, "device": preflight.compute_device(self.config)}
        new_tokens = self.step.new_tokens
        if new_tokens == 0:
            evaluation = record_evaluation(self.model, self.batch, **given)
            return (evaluation,), self.costs.of(evaluation.calls)
        prompt = record_prompt(self.model, self.batch, **given)
        if new_tokens == 1:
            return (prompt,), self.costs.of(prompt.calls)
        length = self.batch["input_ids"].shape[1]
        first = record_token(self.model, self.batch, earlier=length, **given)
        last = record_token(self.model, self.batch, earlier=length + new_tokens - 2, **given)
        found = self.costs.of({PROMPT: prompt.calls[PROMPT], "first": first.calls[TOKEN], "last": last.calls[TOKEN]})
        mean = Cost(
            seconds=(found["first"].seconds + found["last"].seconds) / 2,
            timed_seconds=(found["first"].timed_seconds + found["last"].timed_seconds) / 2,
        )
        return (prompt, last), {PROMPT: found[PROMPT], TOKEN: mean}

    def _tokens(self) -> int:
        """Return the tokens of a step; of a generation the new ones."""
        if self.step.work == "generate":
            return int(self.batch["input_ids"].shape[0]) * self.step.new_tokens
        return tokens_of(self.batch) * self.step.micro_batches


def room_of(config: Config, directories: Sequence[Path]) -> int:
    return resources.room_for_pages(directories, keep_free=config.keep_free, max_spill=config.max_spill)


def resolved(config: Config, processes: int) -> tuple[Config, tuple[Path, ...]]:
    """Return the configuration with a budget for one process, and the directories that pages would go to.

    Raises:
        ConfigError: If there is no process, or no such GPU.
    """
    if processes < 1:
        raise ConfigError(f"processes: must be at least 1, got {processes}")
    directory = ssd_benchmark.directory_for(config.scratch_directory, file_bytes=0)
    ram = resources.default_ram_bytes() if config.ram is None else config.ram
    decided = preflight.check_gpu(config.replace(ram=max(1, ram // processes)))
    return decided, (directory, *config.directories_of(0)[1:])


def tokens_of(batch: Mapping[str, Any]) -> int:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    whole = [tensor for tensor in tensors if not tensor.dtype.is_floating_point]
    if whole:
        return whole[0].numel()
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 1
