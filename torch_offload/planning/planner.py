"""Makes a plan from a recording, the costs of its operators, budgets and rates."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_offload.config import Config, format_size
from torch_offload.diagnostics.probe import Probe
from torch_offload.planning.belady import Moved
from torch_offload.planning.fake_trace import PHASES, ParameterSize, Recording
from torch_offload.planning.operator_costs import Cost
from torch_offload.planning.page_uses import OptimizerName, StepShape, StepUses, UpdateTier, state_element_bytes
from torch_offload.planning.plan import SECONDS_PER_DAY, Plan, PlannedPhase
from torch_offload.planning.step_time import COMPUTE, Phase, Rates, rates_of, total_by_kind, total_by_resource
from torch_offload.planning.tier_traffic import Budgets, TierTraffic, traffic_of
from torch_offload.runtime import preflight

MIN_PAGES_BELOW_DEVICE = 16  # that the links of a device hold at once
WIDEST_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """All that a plan is made from."""

    config: Config
    recording: Recording
    optimizer: OptimizerName | None
    micro_batches: int
    is_clipped: bool
    tokens: int
    probe: Probe
    costs: dict[str, Cost]
    ssd_bytes: int
    endurance_bytes: int
    steps_per_day: float | None

    @property
    def budgets(self) -> Budgets:
        return Budgets(
            ram=self.config.ram or 0, device=self.config.compute_bytes if self.config.gpu is not None else None
        )


def build_plan(inputs: PlanInputs, update_tier: UpdateTier) -> Plan:
    config = inputs.config
    shape = StepShape(
        page_elements=config.page_elements,
        min_paged_bytes=config.min_paged_bytes,
        optimizer=inputs.optimizer,
        micro_batches=inputs.micro_batches,
        pages_activations=config.pages_activations,
        update_tier=update_tier,
    )
    uses = StepUses(inputs.recording, shape)
    traffic = traffic_of(uses, inputs.budgets)
    rates = rates_of(config, inputs.probe)
    phases = _phases(inputs, uses, traffic, update_tier)
    return _summary(inputs, traffic, phases, rates, update_tier)


def _phases(inputs: PlanInputs, uses: StepUses, traffic: TierTraffic, update_tier: UpdateTier) -> list[Phase]:
    """Return every forward and backward of a step; the first forward has the updates."""
    updates = _update_seconds(inputs, uses)
    clipping = _clipping_seconds(inputs) / inputs.micro_batches
    is_beside = update_tier == "host" and _has_real_device(inputs.config)
    phases = []
    for number, moved in enumerate(traffic.ssd):
        name = PHASES[number % len(PHASES)]
        update_seconds = updates if number == 0 else 0.0
        beside = update_seconds if is_beside else 0.0
        compute_seconds = inputs.costs[name].seconds + update_seconds - beside
        link = traffic.link[number] if traffic.link else Moved({}, {})
        phases.append(
            Phase(
                name=name,
                compute_seconds=compute_seconds + (clipping if name == PHASES[1] else 0.0),
                host_update_seconds=beside,
                ssd_read=moved.read,
                ssd_written=moved.written,
                to_device=link.read,
                to_host=link.written,
            )
        )
    return phases


def _has_real_device(config: Config) -> bool:
    """Whether the module computes on another processor than the host's."""
    return config.uses_cuda


def _update_seconds(inputs: PlanInputs, uses: StepUses) -> float:
    """Return the seconds of all updates of a step, by the host's processor."""
    if inputs.optimizer is None:
        return 0.0
    has_masters = any(p.is_trained and p.dtype is torch.bfloat16 for p in inputs.recording.parameters)
    stock = inputs.probe.update["adamw_torch_fused"]
    own = inputs.probe.update["torch_offload.AdamW"]
    rate = own if inputs.optimizer == "torch_offload.AdamW" and has_masters else stock
    return uses.updated_elements / rate


def _clipping_seconds(inputs: PlanInputs) -> float:
    """Return the seconds of all norms: each gradient is read once more."""
    if not inputs.is_clipped:
        return 0.0
    gradients = sum(p.size_bytes for p in inputs.recording.parameters if p.is_trained)
    return gradients / inputs.probe.copy_rate


def _summary(
    inputs: PlanInputs, traffic: TierTraffic, phases: list[Phase], rates: Rates, update_tier: UpdateTier
) -> Plan:
    needed_bytes = _needed_bytes(inputs, traffic)
    budget_bytes = _budget_bytes(inputs)
    missing_bytes = {
        tier: need - budget_bytes[tier] for tier, need in needed_bytes.items() if need > budget_bytes[tier]
    }
    resources = total_by_resource(phases, rates)
    planned = [
        PlannedPhase(name=p.name, seconds=p.seconds(rates), resource_seconds=p.seconds_by_resource(rates))
        for p in phases
    ]
    predicted = sum(phase.seconds for phase in planned)
    return Plan(
        fits=not missing_bytes,
        missing_bytes=missing_bytes,
        remedy=_remedy(inputs, needed_bytes, missing_bytes),
        budget_bytes=budget_bytes,
        needed_bytes=needed_bytes,
        peak_bytes=traffic.peak_bytes,
        placement=traffic.placement,
        parameters=sum(parameter.elements for parameter in inputs.recording.parameters),
        state_bytes=_state_bytes(inputs),
        ssd_read=total_by_kind(phase.ssd_read for phase in phases),
        ssd_written=total_by_kind(phase.ssd_written for phase in phases),
        to_device=total_by_kind(phase.to_device for phase in phases),
        to_host=total_by_kind(phase.to_host for phase in phases),
        update_tier=update_tier,
        phases=planned,
        resource_seconds=resources,
        bottleneck=_bottleneck(planned),
        lower_bound_seconds=max(resources.values()),
        predicted_seconds=predicted,
        timed_share=_timed_share(inputs.costs),
        tokens_per_step=inputs.tokens,
        break_even_tokens=_break_even(inputs, resources),
        endurance_bytes=inputs.endurance_bytes,
        steps_per_day=inputs.steps_per_day or SECONDS_PER_DAY / predicted,
    )


def _state_bytes(inputs: PlanInputs) -> int:
    def of_one(parameter: ParameterSize) -> int:
        states = state_element_bytes(inputs.optimizer, parameter.dtype) if parameter.is_trained else {}
        return parameter.elements * (parameter.element_bytes * (1 + parameter.is_trained) + sum(states.values()))

    return sum(of_one(parameter) for parameter in inputs.recording.parameters)


def _budget_bytes(inputs: PlanInputs) -> dict[str, int]:
    device = {} if inputs.budgets.device is None else {"device": inputs.budgets.device}
    return device | {"ram": inputs.budgets.ram, "ssd": inputs.ssd_bytes}


def _needed_bytes(inputs: PlanInputs, traffic: TierTraffic) -> dict[str, int]:
    """Return what each tier must hold: what is in use at once there, and what ``wrap`` insists on."""
    config = inputs.config
    needed = dict(traffic.needed_bytes)
    paged = [p.size_bytes for p in inputs.recording.parameters if p.size_bytes >= max(config.min_paged_bytes, 1)]
    if paged:
        largest = max(inputs.recording.parameters, key=lambda parameter: parameter.size_bytes)
        least = preflight.least_bytes(config, size_bytes=largest.size_bytes, element_bytes=largest.element_bytes)
        needed[inputs.budgets.compute_tier] = max(needed[inputs.budgets.compute_tier], least)
    if inputs.budgets.device is not None:
        least = MIN_PAGES_BELOW_DEVICE * config.page_elements * WIDEST_ELEMENT_BYTES
        needed["ram"] = max(needed["ram"], least)
    return needed | {"ssd": traffic.peak_bytes["ssd"]}


def _remedy(inputs: PlanInputs, needed: Mapping[str, int], missing: Mapping[str, int]) -> str | None:
    """Return one thing to change about the tier that lacks most."""
    if not missing:
        return None
    tier = max(missing, key=lambda name: missing[name])
    if tier == "ssd":
        return f"give a directory on a disk with {needed[tier]} bytes free ({format_size(needed[tier])})"
    larger = f"give a {tier} of at least {needed[tier]} bytes ({format_size(needed[tier])})"
    largest = max((p.size_bytes for p in inputs.recording.parameters), default=0)
    if tier == inputs.budgets.compute_tier and needed[tier] > 4 * largest and inputs.config.activations == "keep":
        return f"{larger}, or let activations leave memory (activations='page'), or checkpoint the layers"
    return larger


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
    growing = inputs.micro_batches * sum(cost.seconds for cost in inputs.costs.values())
    fixed = resources[COMPUTE] - growing
    slowest = max(seconds for name, seconds in resources.items() if name != COMPUTE)
    return round(inputs.tokens * max(0.0, slowest - fixed) / growing) if growing else 0
