"""Makes a plan from a recording, the costs of its operators, budgets and rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from torch_offload.activations.recompute import ActivationChoice
from torch_offload.config import Config, format_size
from torch_offload.diagnostics.probe import Probe
from torch_offload.errors import ConfigError
from torch_offload.planning.belady import Moved
from torch_offload.planning.fake_trace import PHASES, ParameterSize, Recording
from torch_offload.planning.forward_trace import TOKEN
from torch_offload.planning.operator_costs import Cost
from torch_offload.planning.page_uses import (
    Moments,
    OptimizerName,
    StepShape,
    StepUses,
    UpdateTier,
    moments_named,
    optimizer_named,
    state_bytes_of,
)
from torch_offload.planning.plan import SECONDS_PER_DAY, Plan, PlannedPhase, Work
from torch_offload.planning.step_time import (
    COMPUTE,
    Phase,
    Rates,
    paging_seconds,
    rates_of,
    total_by_kind,
    total_by_resource,
)
from torch_offload.planning.tier_traffic import RESERVED, Budgets, TierTraffic, traffic_of
from torch_offload.runtime import preflight
from torch_offload.system import gpu

MIN_PAGES_BELOW_DEVICE = 16  # that the links of a device hold at once
MAX_REPLAYED_TOKENS = 8  # of a generation; those after them move what the last of these moves


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What a step does.

    Attributes:
        work: Which kind of step.
        new_tokens: Of each row of a generation; 0 for every other.
        optimizer: Whose states and updates there are.
        moments: How they are kept.
        micro_batches: Forward and backward passes.
        is_clipped: Whether the norm of all gradients is taken.
    """

    work: Work = "train"
    new_tokens: int = 0
    optimizer: OptimizerName | None = None
    moments: Moments = "fp32"
    micro_batches: int = 1
    is_clipped: bool = False

    @classmethod
    def of(
        cls,
        work: str,
        new_tokens: int | None,
        optimizer: str | None,
        moments: str,
        micro_batches: int,
        *,
        clipped: bool,
    ) -> "PlannedStep":
        """Take what was asked for. What belongs to training counts for nothing where there is none.

        Raises:
            ConfigError: If something is not known, or contradicts the kind of step.
        """
        if micro_batches < 1:
            raise ConfigError(f"micro_batches: must be at least 1, got {micro_batches}")
        if work == "generate" and (new_tokens is None or new_tokens < 1):
            raise ConfigError(f"new_tokens: must be at least 1 to generate, got {new_tokens}")
        if work != "generate" and new_tokens is not None:
            raise ConfigError(f"new_tokens: {new_tokens} are for work='generate', got work={work!r}")
        if work == "train":
            known = optimizer_named(optimizer)
            return cls(
                optimizer=known,
                moments=moments_named(moments, known),
                micro_batches=micro_batches,
                is_clipped=clipped,
            )
        if work == "evaluate":
            return cls(work="evaluate")
        if work == "generate":
            return cls(work="generate", new_tokens=new_tokens or 0)
        raise ConfigError(f"work: expected train, evaluate or generate, got {work!r}")


@dataclass(frozen=True)
class PlannedMachine:
    """What a step runs on.

    Attributes:
        probe: Its rates.
        processes: How many share it; budgets are of one of them.
        ssd_bytes: What the SSD may hold of one of them.
        endurance_bytes: What the SSD is rated to have written in its life.
    """

    probe: Probe
    processes: int
    ssd_bytes: int
    endurance_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """All that a plan is made from.

    Attributes:
        config: Every setting decided, budgets of one process.
        recording: Of a forward and backward; where there is none, of the first of `passes`.
        passes: Without gradients, of which a step consists: that of an evaluation, or those of a generation's prompt
            and of one more token.
        activations: Which layers were recorded as computing their activations again.
        step: What it does.
        machine: What it runs on.
        tokens: Of a step.
        costs: Of its phases, by name.
        steps_per_day: None: one after the other.
    """

    config: Config
    recording: Recording
    passes: tuple[Recording, ...] = ()
    activations: ActivationChoice | None = None
    step: PlannedStep
    machine: PlannedMachine
    tokens: int
    costs: dict[str, Cost]
    steps_per_day: float | None

    @property
    def budgets(self) -> Budgets:
        return Budgets(
            ram=self.config.ram or 0,
            device=self.config.compute_bytes if self.config.gpu is not None else None,
            reserved=self.config.reserved_bytes if self.config.uses_cuda else None,
            staying=frozenset({"activation"} if self.config.activations == "ram" else ()),
        )

    @property
    def replayed(self) -> tuple[Recording, ...]:
        """The passes of a step that are replayed; empty where a step trains."""
        if self.step.work != "generate":
            return self.passes
        return self.passes[:1] + self.passes[1:] * min(self.step.new_tokens - 1, MAX_REPLAYED_TOKENS)


def updates_in_backward(config: Config, optimizer: OptimizerName | None) -> bool:
    """Whether each parameter of a step is updated as soon as its gradient is complete."""
    return config.update == "backward" and optimizer is not None


def check_updates(config: Config, step: PlannedStep) -> None:
    """Refuse a step that cannot be updated in its backward, if that is asked for.

    Raises:
        ConfigError: The message says what to change.
    """
    if not updates_in_backward(config, step.optimizer):
        return
    if step.is_clipped:
        raise ConfigError("update: 'backward' applies gradients before their norm is known; leave max_grad_norm out")
    if step.micro_batches > 1:
        raise ConfigError(f"update: 'backward' is for one backward per step, got micro_batches={step.micro_batches}")


def build_plan(inputs: PlanInputs, update_tier: UpdateTier) -> Plan:
    config = inputs.config
    uses = _uses(inputs, update_tier, pages_activations=config.pages_activations)
    traffic = traffic_of(uses, inputs.budgets)
    rates = rates_of(config, inputs.machine.probe, processes=inputs.machine.processes)
    phases = _phases(inputs, uses, traffic, update_tier)
    return _summary(inputs, traffic, phases, rates, update_tier)


def _uses(inputs: PlanInputs, update_tier: UpdateTier, *, pages_activations: bool) -> StepUses:
    config = inputs.config
    shape = StepShape(
        page_elements=config.page_elements,
        min_paged_bytes=config.min_paged_bytes,
        optimizer=inputs.step.optimizer,
        moments=inputs.step.moments,
        micro_batches=inputs.step.micro_batches,
        pages_activations=pages_activations and inputs.step.work == "train",
        update_tier=update_tier,
        updates_in_backward=updates_in_backward(config, inputs.step.optimizer),
        uses_homes=config.checkpoint_pages == "in_place" and config.gpu is None,
    )
    return StepUses(inputs.recording, shape, passes=inputs.replayed)


def _phases(inputs: PlanInputs, uses: StepUses, traffic: TierTraffic, update_tier: UpdateTier) -> list[Phase]:
    """Return every phase of a step. The first forward has the updates, or the backward if they are to run there."""
    updates = _update_seconds(inputs, uses, update_tier)
    clipping = _clipping_seconds(inputs) / inputs.step.micro_batches
    has_gpu = inputs.config.uses_cuda
    updating = 1 if updates_in_backward(inputs.config, inputs.step.optimizer) else 0
    is_beside = update_tier == "host" and has_gpu
    phases = []
    for number, (name, moved) in enumerate(zip(uses.phases(), traffic.ssd, strict=True)):
        update_seconds = updates if number == updating else 0.0
        beside = update_seconds if is_beside else 0.0
        compute_seconds = inputs.costs[name].seconds + update_seconds - beside
        link = traffic.link[number] if traffic.link else Moved({}, {})
        on_processor = Moved({}, {}) if has_gpu else moved  # while it would compute
        phases.append(
            Phase(
                name=name,
                compute_seconds=compute_seconds + (clipping if name == PHASES[1] else 0.0),
                paging_seconds=paging_seconds(
                    on_processor.read_bytes, on_processor.written_bytes, inputs.machine.probe
                ),
                host_update_seconds=beside,
                ssd_read=moved.read,
                ssd_written=moved.written,
                to_device=link.read,
                to_host=link.written,
            )
        )
    replayed_tokens = sum(phase.name == TOKEN for phase in phases)
    more = max(0, inputs.step.new_tokens - 1 - replayed_tokens)
    return phases + phases[-1:] * more


def _update_seconds(inputs: PlanInputs, uses: StepUses, update_tier: UpdateTier) -> float:
    """Return the seconds of all updates of a step, by the processor or a GPU.

    Raises:
        ConfigError: If they are to run on a GPU for which the optimizer has no kernels.
    """
    if inputs.step.optimizer is None:
        return 0.0
    has_masters = any(p.is_trained and p.dtype is torch.bfloat16 for p in inputs.recording.parameters)
    is_own = inputs.step.optimizer == "torch_offload.AdamW"
    is_on_gpu = inputs.config.uses_cuda and update_tier == "device"
    rates = inputs.machine.probe.of_gpu.update if is_on_gpu else inputs.machine.probe.update
    if is_own and "torch_offload.AdamW" not in rates:
        raise ConfigError(
            "optimizer: torch_offload.AdamW has no kernels for this GPU (torch-offload doctor says how to build them); "
            "or give optimizer_device='cpu'"
        )
    return uses.updated_elements / rates["torch_offload.AdamW" if is_own and has_masters else "adamw_torch_fused"]


def _clipping_seconds(inputs: PlanInputs) -> float:
    """Return the seconds of all norms: each gradient is read once more."""
    if not inputs.step.is_clipped:
        return 0.0
    gradients = sum(p.size_bytes for p in inputs.recording.parameters if p.is_trained)
    probe = inputs.machine.probe
    return gradients / (probe.of_gpu if inputs.config.uses_cuda else probe).copy_rate


def _summary(
    inputs: PlanInputs, traffic: TierTraffic, phases: list[Phase], rates: Rates, update_tier: UpdateTier
) -> Plan:
    needed_bytes = _needed_bytes(inputs, traffic)
    budget_bytes = _budget_bytes(inputs)
    missing_bytes = {
        tier: need - budget_bytes[tier] for tier, need in needed_bytes.items() if need > budget_bytes[tier]
    }
    resources = total_by_resource(phases, rates)
    planned = _planned_phases(inputs, phases, rates)
    predicted = sum(phase.seconds for phase in planned)
    return Plan(
        work=inputs.step.work,
        fits=not missing_bytes,
        missing_bytes=missing_bytes,
        remedy=_remedy(inputs, needed_bytes, missing_bytes, update_tier),
        budget_bytes=budget_bytes,
        needed_bytes=needed_bytes,
        peak_bytes=traffic.peak_bytes,
        placement=traffic.placement,
        parameters=sum(parameter.model_elements for parameter in inputs.recording.parameters),
        state_bytes=_state_bytes(inputs),
        ssd_read=total_by_kind(phase.ssd_read for phase in phases),
        ssd_written=total_by_kind(phase.ssd_written for phase in phases),
        to_device=total_by_kind(phase.to_device for phase in phases),
        to_host=total_by_kind(phase.to_host for phase in phases),
        update_tier=update_tier,
        activations=inputs.activations,
        phases=planned,
        resource_seconds=resources,
        paging_seconds=sum(phase.paging_seconds for phase in phases),
        bottleneck=_bottleneck(planned),
        lower_bound_seconds=max(resources.values()),
        predicted_seconds=predicted,
        timed_share=_timed_share(inputs.costs),
        tokens_per_step=inputs.tokens,
        processes=inputs.machine.processes,
        break_even_tokens=0 if inputs.step.work == "generate" else _break_even(inputs, resources),
        endurance_bytes=inputs.machine.endurance_bytes,
        steps_per_day=inputs.steps_per_day or SECONDS_PER_DAY / predicted,
    )


def _planned_phases(inputs: PlanInputs, phases: Sequence[Phase], rates: Rates) -> list[PlannedPhase]:
    """Return the phases as they are shown: the tokens of a generation are one."""
    groups = (
        groupby(phases, key=lambda phase: phase.name)
        if inputs.step.work == "generate"
        else ((p.name, [p]) for p in phases)
    )
    planned = []
    for name, group in groups:
        members = list(group)
        planned.append(
            PlannedPhase(
                name=name if len(members) == 1 else f"{len(members)} {name}s",
                seconds=sum(phase.seconds(rates) for phase in members),
                resource_seconds=total_by_resource(members, rates),
            )
        )
    return planned


def _state_bytes(inputs: PlanInputs) -> int:
    def of_one(parameter: ParameterSize) -> int:
        states = state_bytes_of(parameter, inputs.step.optimizer, inputs.step.moments)
        return parameter.elements * (parameter.element_bytes * (1 + parameter.is_trained) + sum(states.values()))

    return sum(of_one(parameter) for parameter in inputs.recording.parameters)


def _budget_bytes(inputs: PlanInputs) -> dict[str, int]:
    budgets = inputs.budgets
    device = {} if budgets.device is None else {"device": budgets.device}
    device |= {} if budgets.reserved is None else {RESERVED: budgets.reserved}
    return device | {"ram": inputs.budgets.ram, "ssd": inputs.machine.ssd_bytes}


def _needed_bytes(inputs: PlanInputs, traffic: TierTraffic) -> dict[str, int]:
    """Return what each tier must hold: what is in use at once there, and what ``wrap`` insists on."""
    config = inputs.config
    needed = dict(traffic.needed_bytes)
    least = least_of_operator(config, inputs.recording.parameters)
    needed[inputs.budgets.compute_tier] = max(needed[inputs.budgets.compute_tier], least)
    if inputs.budgets.device is not None:
        least = MIN_PAGES_BELOW_DEVICE * config.page_elements * gpu.WIDEST_ELEMENT_BYTES
        needed["ram"] = max(needed["ram"], least)
    return needed | {"ssd": traffic.peak_bytes["ssd"]}


def least_of_operator(config: Config, parameters: Sequence[ParameterSize]) -> int:
    """Return the memory that ``wrap`` insists on where the module computes: that of an operator on the largest."""
    paged = [parameter for parameter in parameters if parameter.size_bytes >= max(config.min_paged_bytes, 1)]
    whole = [parameter for parameter in paged if config.uses_cuda or not parameter.is_table]
    if not whole:
        return 0
    largest = max(whole, key=lambda parameter: parameter.size_bytes)
    return preflight.least_bytes(config, size_bytes=largest.size_bytes, element_bytes=largest.element_bytes)


def _remedy(
    inputs: PlanInputs, needed: Mapping[str, int], missing: Mapping[str, int], update_tier: UpdateTier
) -> str | None:
    """Return one thing to change about the tier that lacks most."""
    if not missing:
        return None
    tier = max(missing, key=lambda name: missing[name])
    if tier == "ssd":
        return f"give a directory on a disk with {needed[tier]} bytes free ({format_size(needed[tier])})"
    setting, least_bytes = _setting_of(tier, needed, inputs.config)
    larger = f"give a {setting} of at least {least_bytes} bytes ({format_size(least_bytes)})"
    if tier != inputs.budgets.compute_tier or inputs.step.work != "train":
        return larger
    return f"{larger}{_remedy_of_activations(inputs, needed[tier], update_tier)}"


def _setting_of(tier: str, needed: Mapping[str, int], config: Config) -> tuple[str, int]:
    """Return the setting that gives a tier its bytes, and what it has to be."""
    if tier == "device":
        return "gpu", needed[tier] + config.reserved_bytes
    return ("gpu_reserved" if tier == RESERVED else tier), needed[tier]


def _remedy_of_activations(inputs: PlanInputs, needed_bytes: int, update_tier: UpdateTier) -> str:
    """Say what the activations could do instead, where that helps."""
    config = inputs.config
    if not config.pages_activations:
        paged = traffic_of(_uses(inputs, update_tier, pages_activations=True), inputs.budgets)
        least_bytes = _needed_bytes(inputs, paged)[inputs.budgets.compute_tier]
        if least_bytes < needed_bytes:
            enough = f"then {least_bytes} bytes ({format_size(least_bytes)}) would do"
            return f", or let activations leave memory (activations='page'): {enough}"
        return ""
    largest = max((p.size_bytes for p in inputs.recording.parameters), default=0)
    if needed_bytes > 4 * largest:  # more than an operator on a weight: one on activations, or what is alive beside it
        return ", or lower the batch size: what one operator has of activations is there at once"
    return ""


def _bottleneck(phases: list[PlannedPhase]) -> str:
    """Return the resource that the phases wait for, by the seconds of those in which it is the slowest."""
    waited: dict[str, float] = {}
    for phase in phases:
        name = max(phase.resource_seconds, key=lambda resource: phase.resource_seconds[resource])
        waited[name] = waited.get(name, 0.0) + phase.seconds
    return max(waited, key=lambda resource: waited[resource])


def _timed_share(costs: Mapping[str, Cost]) -> float:
    seconds = sum(cost.seconds for cost in costs.values())
    return sum(cost.timed_seconds for cost in costs.values()) / seconds if seconds else 1.0


def _break_even(inputs: PlanInputs, resources: Mapping[str, float]) -> int:
    """Return the tokens at which the computation that grows with them fills the time of the slowest link."""
    growing = inputs.step.micro_batches * sum(cost.seconds for cost in inputs.costs.values())
    fixed = resources[COMPUTE] - growing
    slowest = max(seconds for name, seconds in resources.items() if name != COMPUTE)
    return round(inputs.tokens * max(0.0, slowest - fixed) / growing) if growing else 0
